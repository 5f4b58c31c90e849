"""``powersgd``: a matrix as the product of two thin ones, found by one power iteration.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727), algorithm 1. For a matrix M of r x c and a start Q of c x rank::

    P = M Q;  orthonormalize P's columns;  Q = M^T P;  M is about P Q^T

Both products are linear in M: ranks sum their P, orthonormalize the sum, sum their Q, and have the
approximation of the sum of their matrices. :func:`start`, :func:`orthogonalize`, :func:`finish` and
:func:`reconstruct` are those steps; a Q kept from the step before makes a better start than a random one.

All arithmetic is float32 in an order that does not depend on the instruction set (orthogonalization keeps its
sums in float64), so ranks on different machines that begin with the same bits end with the same bits.

Payload: uint64 rows, uint64 columns, uint64 rank, P (row-major, rows x rank), Q (row-major, columns x rank),
both float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.linear.base import LinearCodec, Reduced, Reduction, Round, Terms
from hybridcomp.codecs.linear.powersgd_start import Matrix, initial_q
from hybridcomp.codecs.table import register
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

PREFIX = struct.Struct("<QQQ")
MAX_RANK = 4096
_PANEL = 1 << 18  # elements widened at a time: 1 MiB


# -- the linear steps ----------------------------------------------------------------------------------------


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of the matrix that an array of ``shape`` is taken for.

    Two and more dimensions: the first by all the rest. Fewer: near-square, the last row filled with zeros.
    """
    if len(shape) >= 2:
        return shape[0], math.prod(shape[1:])
    n = math.prod(shape)
    if n == 0:
        return 0, 0
    cols = math.isqrt(n - 1) + 1
    return -(-n // cols), cols


def effective_rank(shape: tuple[int, ...], rank: int) -> int:
    """Return ``rank``, or less where a matrix of that shape cannot have so many independent columns."""
    return min(rank, *matrix_shape(shape))


def start(matrix: Matrix, q: Matrix) -> Matrix:
    """Compute P = M Q.

    Args:
        matrix: float32 of (rows, cols), C-contiguous.
        q: float32 of (cols, rank).

    Returns:
        float32 of (rows, rank).
    """
    _expect(matrix, "matrix")
    return _project([_Panel(0, matrix.shape[0], matrix)], matrix.shape, q)


def orthogonalize(p: Matrix) -> None:
    """Make the columns of ``p`` orthonormal in place, from left to right (Gram-Schmidt, each column twice).

    A column that depends on those before it becomes zero. Non-finite values spread to all columns after them.

    Args:
        p: float32 of (rows, rank), C-contiguous.
    """
    _expect(p, "p")
    columns = np.ascontiguousarray(p.T)
    native.kernels().lowrank_orthogonalize(columns, *p.shape)
    p[...] = columns.T


def finish(matrix: Matrix, p: Matrix) -> Matrix:
    """Compute Q = M^T P.

    Args:
        matrix: float32 of (rows, cols), C-contiguous.
        p: float32 of (rows, rank), C-contiguous.

    Returns:
        float32 of (cols, rank), C-contiguous.
    """
    _expect(matrix, "matrix")
    return _project_back([_Panel(0, matrix.shape[0], matrix)], matrix.shape, p)


def reconstruct(p: Matrix, q: Matrix, out: Matrix, *, add: bool = False) -> None:
    """Write P Q^T to ``out``, or add it.

    Args:
        p: float32 of (rows, rank).
        q: float32 of (cols, rank).
        out: float32 of (rows, cols) or of at most rows * cols elements, C-contiguous.
        add: add to what ``out`` holds.
    """
    _expect(out, "out")
    columns = np.ascontiguousarray(q.T, np.float32)
    native.kernels().lowrank_reconstruct(
        np.ascontiguousarray(p, np.float32), columns, p.shape[0], q.shape[0], p.shape[1], out, add
    )


class _Panel(NamedTuple):
    """Rows first .. first + rows of a matrix, in float32; the last row may be short."""

    first: int
    rows: int
    values: Matrix


def _panels(src: Flat, shape: tuple[int, int]) -> Iterator[_Panel]:
    """Yield a matrix of ``shape`` in whole rows: at once if it is aligned float32, else widened a panel at a time."""
    rows, cols = shape
    if src.dtype is DType.FLOAT32 and src.data.flags.aligned:
        yield _Panel(0, rows, src.data)
        return
    if src.size == 0:
        yield _Panel(0, rows, np.empty(0, np.float32))
        return
    step = max(1, _PANEL // max(1, cols))
    buffer = np.empty(min(src.size, step * cols), np.float32)
    for first in range(0, rows, step):
        part = src.data[first * cols : (first + step) * cols]
        values = buffer[: part.size]
        native.kernels().convert(part, src.dtype, values, DType.FLOAT32, False)
        yield _Panel(first, min(step, rows - first), values)


def _project(panels: Iterable[_Panel], shape: tuple[int, ...], q: Matrix) -> Matrix:
    rows, cols = shape
    if q.ndim != 2 or q.shape[0] != cols:
        raise ValueError(f"q must have the shape ({cols}, rank), not {q.shape}")
    p = np.empty((rows, q.shape[1]), np.float32)
    columns = np.ascontiguousarray(q.T, np.float32)
    for first, count, values in panels:
        part = p[first : first + count]
        native.kernels().lowrank_project(values, count, cols, q.shape[1], columns, part, False)
    return p


def _project_back(panels: Iterable[_Panel], shape: tuple[int, ...], p: Matrix) -> Matrix:
    rows, cols = shape
    if p.ndim != 2 or p.shape[0] != rows:
        raise ValueError(f"p must have the shape ({rows}, rank), not {p.shape}")
    columns = np.zeros((p.shape[1], cols), np.float32)
    contiguous = np.ascontiguousarray(p, np.float32)
    for first, count, values in panels:  # the sums go on from panel to panel, in the order of the rows
        part = contiguous[first : first + count]
        native.kernels().lowrank_project(values, count, cols, p.shape[1], columns, part, True)
    return np.ascontiguousarray(columns.T)


def _expect(array: Matrix, name: str) -> None:
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be float32 and C-contiguous, not {array.dtype} of strides {array.strides}"
        )


# -- the codec -----------------------------------------------------------------------------------------------


@register
class PowerSGDCodec(LinearCodec):
    """PowerSGD: approximates a matrix by its ``rank`` strongest directions.

    Made for gradients with error feedback; float32 inside, whatever the dtype: float64 loses precision, and
    magnitudes near the end of float32's range overflow to NaN. A NaN or an infinity makes all of the array
    NaN.

    As a message it is meant for arrays whose shape is known. Flat arrays encode (as a near-square matrix),
    but :meth:`can_carry` refuses them, so that a policy goes on to its next codec: a flattened bucket has no
    low-rank structure to find.

    Args:
        rank: columns of P and Q, from 1 to 4096; less where the matrix is smaller.
        seed: seed of the random start, from 0 to 2^63 - 1.
    """

    name = "powersgd"
    wire_id = 32
    examples = (
        "powersgd",
        "powersgd:rank=1,seed=7",
    )
    partial = True
    fixed_size = False
    sums = 2

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        self._rank = checks.integer("rank", rank, 1, MAX_RANK)
        self._seed = checks.integer("seed", seed, 0, 2**63 - 1)
        self._begin: Matrix | None = None

    @property
    def rank(self) -> int:
        """Return the number of columns of P and Q."""
        return self._rank

    @property
    def seed(self) -> int:
        """Return the seed of the random start."""
        return self._seed

    @property
    def params(self) -> dict[str, Any]:
        return {"rank": self._rank, "seed": self._seed}

    def can_carry(self, dtype: DType, shape: tuple[int, ...]) -> str | None:
        reason = super().can_carry(dtype, shape)
        if reason is None and len(shape) < 2:
            return "it has no matrix shape"
        return reason

    def refuses(self, src: Flat) -> str | None:
        return super().can_carry(src.dtype, src.shape)

    def beginning_with(self, q: Matrix | None) -> PowerSGDCodec:
        """Return this codec for messages that begin with ``q``, not with random numbers, if the columns are as many.

        The factor of the message before (:func:`factor_of`) makes a better start where arrays change slowly.
        """
        codec = type(self)(self._rank, self._seed)
        codec._begin = q
        return codec

    def message_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the message of an array of ``shape``."""
        rows, cols = matrix_shape(shape)
        return HEADER_BYTES + PREFIX.size + 4 * (rows + cols) * effective_rank(shape, self._rank)

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        # Over all shapes: P and Q are largest, n + rank^2 elements, where a side is no longer than the rank.
        # Padding a flat array to a rectangle adds less than a row.
        return HEADER_BYTES + PREFIX.size + 4 * (n + self._rank * self._rank + self._rank)

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        rows, cols = matrix_shape(src.shape)
        rank = effective_rank(src.shape, self._rank)
        q = self._begin
        if q is None or q.shape != (cols, rank):
            q = initial_q(cols, rank, self._seed)
        p = _project(_panels(src, (rows, cols)), (rows, cols), q)
        orthogonalize(p)
        q = _project_back(_panels(src, (rows, cols)), (rows, cols), p)
        PREFIX.pack_into(out.data, HEADER_BYTES, rows, cols, rank)
        at = HEADER_BYTES + PREFIX.size
        for factor in (p, q):
            out[at : at + factor.nbytes] = arrays.byte_view(factor)
            at += factor.nbytes
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=at - HEADER_BYTES
        )

    def reduce(self, x: Flat, terms: Terms) -> Reduction:
        """Reduce in two rounds: P, and Q.

        ``warm`` keeps the mean Q by name; the step is not used.

        The approximation is of the mean, which is taken for each rank's own part.
        """
        shape, columns = matrix_shape(x.shape), effective_rank(x.shape, self._rank)
        kind = x.dtype.accumulator.storage
        q = terms.warm.get(terms.name) if terms.warm is not None and terms.name is not None else None
        if q is None or q.shape != (shape[1], columns):
            q = initial_q(shape[1], columns, self._seed)
        p = _project(_panels(x, shape), shape, q)
        yield Round(p, "sum")
        orthogonalize(p)
        q = _project_back(_panels(x, shape), shape, p)
        yield Round(q, "sum")
        q /= np.float32(terms.ranks)
        if terms.warm is not None and terms.name is not None and np.isfinite(q).all():
            terms.warm[terms.name] = q
        if terms.residual is not None and terms.mean and x.dtype is DType.FLOAT32 and x.data.flags.aligned:
            return _replace(p, q, x.data, terms.residual)
        approximation = np.empty(x.size, np.float32)
        reconstruct(p, q, approximation)
        wide = approximation.astype(kind, copy=False)
        return Reduced(wide if terms.mean else wide * kind.type(terms.ranks), wide if terms.own else None)

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        _open(msg, header)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        _expand(*_open(msg, header), out, dtype, add=False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        _expand(*_open(msg, header), acc, header.dtype.accumulator, add=True)


def _replace(p: Matrix, q: Matrix, values: Matrix, residual: Matrix) -> Reduced:
    """Write P Q^T over the values, and their difference from it to the residual, both in one pass."""
    if not np.isfinite(q).all():
        values[...] = np.nan  # as all of P Q^T would be
        return Reduced(values, None, replaced=True)
    columns = np.ascontiguousarray(q.T)
    if not native.kernels().lowrank_replace(p, columns, p.shape[0], q.shape[0], p.shape[1], values, residual):
        residual[...] = 0  # the product of finite factors, or the difference, overflowed
    return Reduced(values, None, replaced=True)


def _expand(p: Matrix, q: Matrix, out: np.ndarray[Any, Any], dtype: DType, *, add: bool) -> None:
    """Write P Q^T to, or add it to, ``out`` of any float dtype: by way of a panel of rows unless it is float32."""
    if out.size == 0:
        return
    if dtype is DType.FLOAT32 and out.flags.aligned:
        reconstruct(p, q, out, add=add)
        return
    cols = q.shape[0]
    step = max(1, _PANEL // max(1, cols))
    buffer = np.empty(min(out.size, step * cols), np.float32)
    for first in range(0, p.shape[0], step):
        part = out[first * cols : (first + step) * cols]
        values = buffer[: part.size]
        reconstruct(p[first : first + step], q, values)
        native.kernels().convert(values, DType.FLOAT32, part, dtype, add)


def factor_of(message: ByteArray) -> Matrix:
    """Return a copy of a message's Q; the message is one that has just been encoded, or was checked."""
    return _open(message, wire.peek(message))[1].copy()


def open_prefix(payload: bytes | memoryview, header: wire.Header) -> tuple[int, int, int]:
    """Check all of a payload but P and Q.

    Args:
        payload: first bytes of the payload: the prefix.
        header: header of the message.

    Returns:
        Rows, columns and rank.

    Raises:
        WireError: the prefix and the header do not fit together.
    """
    checks.floating(header, PowerSGDCodec.name)
    if header.payload < PREFIX.size:
        raise WireError(f"malformed powersgd payload: {header.payload} bytes are too few")
    rows, cols, rank = PREFIX.unpack_from(payload, 0)
    # The count is less than a row short of a full matrix, as encode_flat makes it.
    fits = (rows - 1) * cols < header.count <= rows * cols if header.count else rows * cols == 0
    limited = rank <= min(rows, cols, MAX_RANK) and (rank > 0 or header.count == 0)
    limited = limited and max(rows, cols) <= wire.MAX_COUNT  # an empty matrix may have one side of any length
    if not (fits and limited) or header.payload - PREFIX.size != 4 * (rows + cols) * rank:
        raise WireError(
            f"malformed powersgd payload: {header.payload} bytes for a {rows} x {cols} matrix of rank {rank} "
            f"and {header.count} elements"
        )
    return rows, cols, rank


def _open(msg: ByteArray, header: wire.Header) -> tuple[Matrix, Matrix]:
    """Check a message; return P and Q (views of it where it is aligned)."""
    rows, cols, rank = open_prefix(msg[HEADER_BYTES:].data, header)
    factors = msg[HEADER_BYTES + PREFIX.size :]
    split = 4 * rows * rank
    p = _floats(factors[:split]).reshape(rows, rank)
    q = _floats(factors[split:]).reshape(cols, rank)
    return p, q


def _floats(data: ByteArray) -> Matrix:
    values = data.view(np.float32)
    return values if values.flags.aligned else values.copy()
