"""``sketch``: sparse tensors, summed by a bitmap of the non-zeros and a count sketch of their values.

H. Li et al.: "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression" (arXiv:2402.07529).
For gradients that are mostly zeros: of embeddings, or what a sparsifier left. A reduction takes two rounds:

1. Bitmaps of the non-zeros are OR-ed: all ranks know where the sum has values, and which sketch they fit.
2. Element i is in lane i % lanes of block i // lanes. Three hashes give a block three rows of a table and signs;
   its values are added to those rows, lane by lane. The tables of all ranks are summed.

Then the sum is peeled, by all ranks in the same order: an element that is alone in one of its three counters is
read there and taken out of the other two, which may leave another alone. Whether that reaches every element
depends on where they are, not on their values, so it is known after round 1. Each 262,144 elements have a table of
their own. It begins with ``load`` elements per counter in the fullest lane, and grows by an eighth with other
hashes until all can be peeled, eight times at most. (Random elements can be peeled up to a load of about 0.8.)
Where it would not have less than half the numbers of the elements, these are summed as they are. What is left over
in the end gets the median of its three counters, and :attr:`.Reduced.recovered` says how much was not.

The sum is float addition's in another order: an element's error is that of rounding the largest of the values
that share counters with it. A NaN or an infinity may spoil elements that share counters with it, too.
``form=packed`` sums, in round 2, the values where any rank has one, without a table: fewer numbers, and each
element's sum is its own. The table is for what sums without knowing the union.

A message is of one tensor, whose receiver knows where the values are: it holds no table but the values themselves,
and decodes to the same bits, whatever they are.

Payload: uint32 form, uint32 zero, uint64 k; form 0: all values (k = count); form 1: the bitmap of the k elements
whose bits are not all zero, 64 to a little-endian word, then their values, both in the message's dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat, byte_view
from hybridcomp.codecs import checks
from hybridcomp.codecs.linear.base import (
    Array,
    LinearCodec,
    Reduced,
    Reduction,
    Round,
    Terms,
    derived_seed,
    widened,
)
from hybridcomp.codecs.table import register
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

PREFIX = struct.Struct("<IIQ")
DENSE, PACKED = 0, 1
_TRIES = 8
PART = 1 << 18  # elements: a table that a core keeps at hand, and sparsity that differs from part to part
_FORMS = ("sketch", "packed")


@dataclass(frozen=True, slots=True)
class Table:
    """A sketch's layout: ``3 * third`` rows of ``lanes`` counters, and the seed of its hashes."""

    lanes: int
    third: int
    seed: int

    @property
    def counters(self) -> int:
        """Return the number of counters."""
        return 3 * self.third * self.lanes


@dataclass(frozen=True, slots=True)
class Part:
    """A range of the elements, sent by a table, packed, or else as it is.

    Attributes:
        elements: which.
        size: of what travels, in numbers.
        table: the sketch's layout.
        packed: the values of the union alone.
    """

    elements: slice
    size: int
    table: Table | None = None
    packed: bool = False

    @property
    def words(self) -> slice:
        """Return the range of the bitmap's words that stand for the elements."""
        return slice(self.elements.start // 64, words_of(self.elements.stop))


@register
class SketchCodec(LinearCodec):
    """Sums of sparse tensors in the compressed domain.

    Args:
        load: elements per counter that a table begins with; from 0.05 to 1.
        form: of a reduction: ``sketch`` or ``packed``.
        lanes: elements of a block; a power of two from 1 to 4096.
        seed: of the hashes, from 0 to 2^63 - 1.
    """

    name = "sketch"
    wire_id = 34
    fixed_size = False
    rounds = 2
    fixed_rounds = False
    seldom = frozenset({"form", "lanes", "seed"})

    def __init__(self, load: float = 0.6, form: str = "sketch", lanes: int = 4, seed: int = 0) -> None:
        if isinstance(load, bool) or not isinstance(load, int | float) or not 0.05 <= load <= 1:
            raise ValueError(f"load must be a number from 0.05 to 1, not {load!r}")
        if form not in _FORMS:
            raise ValueError(f"form must be one of {', '.join(_FORMS)}, not {form!r}")
        self._load = float(load)
        self._form = form
        self._lanes = checks.integer("lanes", lanes, 1, 4096)
        if lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 1 to 4096, not {lanes!r}")
        self._seed = checks.integer("seed", seed, 0, 2**63 - 1)

    @property
    def load(self) -> float:
        """Return the number of elements per counter that a table begins with."""
        return self._load

    @property
    def form(self) -> str:
        """Return the form: ``sketch`` or ``packed``."""
        return self._form

    @property
    def lanes(self) -> int:
        """Return the number of elements of a block."""
        return self._lanes

    @property
    def seed(self) -> int:
        """Return the seed of the hashes."""
        return self._seed

    @property
    def params(self) -> dict[str, Any]:
        return {"load": self._load, "form": self._form, "lanes": self._lanes, "seed": self._seed}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + PREFIX.size + n * arrays.as_dtype(dtype).itemsize

    # -- messages ------------------------------------------------------------------------------------

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        kernels = native.kernels()
        start = HEADER_BYTES + PREFIX.size
        item = src.dtype.itemsize
        bitmap = np.empty(words_of(src.size), np.uint64)
        k = kernels.sketch_mask(src.data, src.dtype, bitmap)
        if bitmap.nbytes + k * item < src.nbytes:
            values = start + bitmap.nbytes
            end = values + k * item
            out[start:values] = byte_view(bitmap)
            kernels.sketch_gather(bitmap, src.data, src.dtype, out[values:end])
            PREFIX.pack_into(out.data, HEADER_BYTES, PACKED, 0, k)
        else:
            end = start + src.nbytes
            out[start:end] = byte_view(src.data)
            PREFIX.pack_into(out.data, HEADER_BYTES, DENSE, 0, src.size)
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=end - HEADER_BYTES
        )

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        _open(msg, header)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        bitmap, values = _open(msg, header)
        kernels = native.kernels()
        if bitmap is None:
            kernels.convert(values, header.dtype, out, dtype, False)
            return
        checks.status(
            kernels.sketch_scatter(bitmap, _typed(values, header.dtype, dtype), out, dtype, False), cls.name
        )

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        bitmap, values = _open(msg, header)
        kernels, kind = native.kernels(), header.dtype.accumulator
        if bitmap is None:
            kernels.convert(values, header.dtype, acc, kind, True)
            return
        checks.status(
            kernels.sketch_scatter(bitmap, _typed(values, header.dtype, kind), acc, kind, True), cls.name
        )

    # -- the reduction -------------------------------------------------------------------------------

    def reduce(self, x: Flat, terms: Terms) -> Reduction:
        """Reduce in two rounds: the bitmaps, and what :meth:`plan` makes of their union."""
        kernels = native.kernels()
        kind = x.dtype.accumulator
        words = np.empty(words_of(x.size), np.uint64)
        kernels.sketch_mask(x.data, x.dtype, words)
        mine = words.copy()
        yield Round(words, "or")
        parts = self.plan(words, x.size)
        sums = np.zeros(sum(part.size for part in parts), kind.storage)
        for part, there in _placed(parts, sums):
            data = x.data[part.elements]
            if part.table is not None:
                fold(mine[part.words], Flat(data, x.dtype, data.shape, True, False), part.table, there)
            elif part.packed:
                values = np.empty(part.size, x.dtype.storage)
                kernels.sketch_gather(words[part.words], data, x.dtype, values)
                kernels.convert(values, x.dtype, there, kind, False)
            else:
                kernels.convert(data, x.dtype, there, kind, False)
        yield Round(sums, "sum")
        if terms.mean:
            sums /= sums.dtype.type(terms.ranks)
        total = np.zeros(x.size, kind.storage)
        remained = 0
        for part, there in _placed(parts, sums):
            out = total[part.elements]
            if part.table is not None:
                remained += peel(words[part.words], part.table, there, out)
            elif part.packed:
                kernels.sketch_scatter(words[part.words], there, out, kind, False)
            else:
                out[:] = there
        union = kernels.sketch_count(words, x.size)
        return Reduced(total, widened(x) if terms.own else None, 1 - remained / union if union else 1.0)

    def plan(self, words: Array, n: int) -> list[Part]:
        """Plan how the parts of a tensor are sent in round 2.

        Args:
            words: bitmap of the union's ``n`` elements, uint64.
        """
        return [self._part(words, slice(at, min(at + PART, n))) for at in range(0, n, PART)]

    def _part(self, words: Array, elements: slice) -> Part:
        kernels = native.kernels()
        n = elements.stop - elements.start
        part = Part(elements, n)
        mine = words[part.words]
        if self._form == "packed":
            count = kernels.sketch_count(mine, n)
            return Part(elements, count, packed=True) if 2 * count < n else part
        fullest = kernels.sketch_fullest(mine, n, self._lanes)
        if not fullest:
            return Part(elements, 0, packed=True)
        third = max(2, -int(-fullest // (3 * self._load)))
        for attempt in range(_TRIES):
            table = Table(self._lanes, third + -(-third * attempt // 8), derived_seed(self._seed, attempt))
            if 2 * table.counters >= n:
                break
            part = Part(elements, table.counters, table)
            if not kernels.sketch_stuck(mine, n, table.lanes, table.third, table.seed):
                break
        return part


def _placed(parts: list[Part], sums: Array) -> Iterator[tuple[Part, Array]]:
    at = 0
    for part in parts:
        yield part, sums[at : at + part.size]
        at += part.size


def fold(words: Array, x: Flat, table: Table, counters: Array) -> None:
    """Add a tensor to a sketch.

    Args:
        words: bitmap of the elements to add, uint64.
        x: the tensor.
        table: the sketch's layout.
        counters: float32 (float64 for float64), ``table.counters`` of them.
    """
    native.kernels().sketch_fold(words, x.data, x.dtype, table.lanes, table.third, table.seed, counters)


def peel(words: Array, table: Table, counters: Array, out: Array) -> int:
    """Write the elements of a sketch to ``out``; return how many are only estimates.

    Args:
        words: bitmap of the elements, uint64.
        table: the sketch's layout.
        counters: the sketch, float32 or float64; used up.
        out: of the same dtype, written where the bitmap has a bit.
    """
    kind = arrays.as_dtype(out.dtype)
    left: int = native.kernels().sketch_peel(words, table.lanes, table.third, table.seed, counters, out, kind)
    return left


def words_of(n: int) -> int:
    """Return the number of words of a bitmap of ``n`` elements."""
    return -(-n // 64)


def _typed(values: ByteArray, source: DType, dtype: DType) -> Array | ByteArray:
    """Return packed values in another dtype."""
    if source is dtype:
        return values
    out = np.empty(values.size // source.itemsize, dtype.storage)
    native.kernels().convert(values, source, out, dtype, False)
    return out


def open_prefix(payload: bytes | memoryview, header: wire.Header) -> tuple[int, int]:
    """Check all of a payload but the bitmap.

    Args:
        payload: its first bytes: the prefix.
        header: of the message.

    Returns:
        The form and the number of values.

    Raises:
        WireError: they do not fit the payload.
    """
    checks.floating(header, SketchCodec.name)
    if header.payload < PREFIX.size:
        raise WireError(f"malformed sketch payload: {header.payload} bytes are too few")
    form, zero, k = PREFIX.unpack_from(payload, 0)
    bitmap = 8 * words_of(header.count) if form == PACKED else 0
    fits = k == header.count if form == DENSE else k <= header.count
    size = PREFIX.size + bitmap + k * header.dtype.itemsize
    if form not in (DENSE, PACKED) or zero or not fits or header.payload != size:
        raise WireError(
            f"malformed sketch payload: form {form} with {k} of {header.count} elements in {header.payload} bytes"
        )
    return form, k


def _open(msg: ByteArray, header: wire.Header) -> tuple[ByteArray | None, ByteArray]:
    """Check a message; return its bitmap (None: all values are there) and its values."""
    form, _ = open_prefix(msg[HEADER_BYTES:].data, header)
    body = msg[HEADER_BYTES + PREFIX.size :]
    bitmap = 8 * words_of(header.count) if form == PACKED else 0
    return (body[:bitmap] if form == PACKED else None), body[bitmap:]
