"""``powersgd`` on a device: the products with the matrix by cuBLAS in float32, whose order of sums is its own.

So P and Q of a message, and of a reduction's rounds, may differ from the CPU's by rounding: what is alike is the
layout. P Q^T of given factors has the CPU's bits, and in a reduction the summed P is orthonormalized in host memory
by the CPU's kernels: ranks that sum the same bits end with the same bits, be they on devices or not.
"""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import suffix
from hybridcomp.codecs.device.linear import base
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.linear.base import Reduced, Reduction, Round, Terms
from hybridcomp.codecs.linear.powersgd import (
    PREFIX,
    PowerSGDCodec,
    effective_rank,
    matrix_shape,
    open_prefix,
    orthogonalize,
)
from hybridcomp.codecs.linear.powersgd_start import DEVIATION, initial_state
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

_THREADS = 256
_GRAM_THREADS = 512
_ROWS = 16  # rows of a thread of `reconstruct`


class PowerSGDDriver(base.LinearDriver):
    """The driver of ``powersgd``."""

    def modules(self) -> tuple[str, ...]:
        return ("lowrank", "linear", "convert")

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        return self.encode_shaped(codec, src, dtype, src.shape, payload, queue)

    def encode_shaped(
        self,
        codec: Codec,
        src: DeviceArray,
        dtype: DType,
        shape: tuple[int, ...],
        payload: DeviceArray,
        queue: Queue,
    ) -> int | DeviceArray:
        assert isinstance(codec, PowerSGDCodec)
        rows, cols = matrix_shape(shape)
        rank = effective_rank(shape, codec.rank)
        queue.launch("lowrank", "lowrank_prefix", 1, 32, payload, rows, cols, rank)
        size = PREFIX.size + 4 * (rows + cols) * rank
        if not rank:
            return size
        factors = payload[PREFIX.size : size].view(np.float32)
        p, q = factors[: rows * rank], factors[rows * rank :]
        matrix = _matrix(queue, src, dtype, (rows, cols))
        queue.matmul(matrix, _initial_q(queue, cols, rank, codec.seed), p, (rows, cols, rank))
        vectors = queue.array(rows * rank, np.float32)
        _transpose(queue, p, vectors, rows, rank)
        queue.launch("lowrank", "lowrank_orthogonalize", 1, _GRAM_THREADS, vectors, rows, rank)
        _transpose(queue, vectors, p, rank, rows)
        queue.matmul(matrix, p, q, (cols, rows, rank), transposed=True)
        _canonical(queue, q)
        return size

    def check(self, header: Header, head: bytes) -> None:
        open_prefix(head, header)

    def decode(
        self,
        header: Header,
        head: bytes,
        payload: DeviceArray,
        out: DeviceArray,
        dtype: DType,
        add: bool,
        queue: Queue,
    ) -> None:
        rows, cols, rank = open_prefix(head, header)
        factors = payload[PREFIX.size :].view(np.float32)
        p, q = factors[: rows * rank], factors[rows * rank :]
        _reconstruct(queue, p, q, (rows, cols, rank), out, dtype, add=add)

    def reduce(self, codec: Codec, x: Flat, terms: Terms, staging: base.Staging) -> Reduction:
        """Reduce as on the CPU, in two rounds: P, and Q.

        ``warm`` is host memory, so that either side goes on from the other's.
        """
        assert isinstance(codec, PowerSGDCodec)
        queue, kind = staging.queue, x.dtype.accumulator
        (rows, cols), rank = matrix_shape(x.shape), effective_rank(x.shape, codec.rank)
        warm, name = terms.warm, terms.name
        start = None if warm is None or name is None else warm.get(name)
        if start is None or start.shape != (cols, rank):
            q = _initial_q(queue, cols, rank, codec.seed)
        else:
            q = staging.send_copy(np.ascontiguousarray(start, np.float32))
        matrix = _matrix(queue, x.data, x.dtype, (rows, cols))
        p = queue.array(rows * rank, np.float32)
        queue.matmul(matrix, q, p, (rows, cols, rank))
        _canonical(queue, p)
        left, ready = staging.fetch(p)
        left = left.reshape(rows, rank)
        yield Round(left, "sum", ready)
        orthogonalize(left)
        staging.send(left, p)
        queue.matmul(matrix, p, q, (cols, rows, rank), transposed=True)
        _canonical(queue, q)
        right, ready = staging.fetch(q)
        right = right.reshape(cols, rank)
        yield Round(right, "sum", ready)
        right /= np.float32(terms.ranks)
        if warm is not None and name is not None and np.isfinite(right).all():
            warm[name] = right.copy()
        staging.send(right, q)
        total = queue.array(x.size, kind.storage)
        _reconstruct(queue, p, q, (rows, cols, rank), total, kind)
        own = None
        if terms.own:
            own = queue.array(x.size, kind.storage)
            queue.copy(own, total)
        if not terms.mean:
            base.multiply(queue, total, kind, terms.ranks)
        return Reduced(total, own)


def _matrix(queue: Queue, src: DeviceArray, dtype: DType, shape: tuple[int, int]) -> DeviceArray:
    """Return all rows of the matrix in float32: ``src`` itself, or a copy whose last row is filled with zeros."""
    elements = shape[0] * shape[1]
    if dtype is DType.FLOAT32 and src.size == elements:
        return src
    matrix = queue.array(elements, np.float32)
    convert(queue, src, dtype, matrix, DType.FLOAT32, src.size)
    base.fill(queue, matrix[src.size :])
    return matrix


def _initial_q(queue: Queue, cols: int, rank: int, seed: int) -> DeviceArray:
    """Return the random start of :func:`.powersgd_start.initial_q`, the same bits, in device memory."""
    q = queue.array(cols * rank, np.float32)
    deviation = int(np.float64(DEVIATION).view(np.uint64))
    blocks = queue.blocks(q.size, _THREADS)
    queue.launch("lowrank", "lowrank_initial", blocks, _THREADS, q, q.size, initial_state(seed), deviation)
    return q


def _canonical(queue: Queue, values: DeviceArray) -> None:
    """Replace every NaN by one and the same."""
    blocks = queue.blocks(values.size, _THREADS)
    queue.launch("lowrank", "lowrank_canonical", blocks, _THREADS, values, values.size)


def _transpose(queue: Queue, source: DeviceArray, to: DeviceArray, rows: int, cols: int) -> None:
    blocks = queue.blocks(source.size, _THREADS)
    queue.launch("lowrank", "lowrank_transpose", blocks, _THREADS, source, to, rows, cols)


def _reconstruct(
    queue: Queue,
    p: DeviceArray,
    q: DeviceArray,
    shape: tuple[int, int, int],
    out: DeviceArray,
    dtype: DType,
    *,
    add: bool = False,
) -> None:
    """Write the first ``out.size`` elements of P Q^T, or add them; ``shape`` is rows, columns and rank."""
    rows, cols, rank = shape
    if not out.size:
        return
    width = next((w for w in (32, 64, 128) if cols <= w), 256)  # columns of a block's tile
    tall = _THREADS // width * _ROWS
    tiles = -(-rows // tall) * -(-cols // width)
    name = f"lowrank_reconstruct_{suffix(dtype)}{'_add' if add else ''}"
    args = (p, q, out, out.size, rows, cols, rank, width, queue.status)
    queue.launch("lowrank", name, queue.blocks(tiles, 1, 16), _THREADS, *args)
