"""``sketch``: sparse tensors, summed by an index of the non-zeros and a count sketch of their values.

H. Li et al.: "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression" (arXiv:2402.07529).
It is for gradients that are mostly zeros: those of embeddings, or after a sparsifier. The index says which elements the
sum has, the sketch holds their values. Element i is in lane i % lanes of block i // lanes. Three hashes give a block
three rows of a table and signs; its values are added to those rows, lane by lane. The tables of all ranks are summed.
Then the sum is peeled, by all ranks in the same order: an element that is alone in one of its three counters is read
there and taken out of the other two, which may leave another alone. Whether that reaches every element depends on where
they are, not on their values. (Random elements can be peeled up to a load of about 0.8.) Each 262,144 elements have a
table of their own. An element left over in the end gets the median of its three counters, and
:attr:`.Reduced.recovered` is the share of the elements that were peeled.

``index=bitmap`` takes two rounds:

1. Bitmaps of the non-zeros are OR-ed: all ranks know where the sum has values, and which sketch they fit.
2. Tables that fit are summed. Each begins with ``load`` elements per counter in the fullest lane, and grows by an
   eighth with other hashes until all can be peeled, eight times at most. Where it would not have less than half the
   numbers of the elements, these are summed as they are. ``form=packed`` sums the values where any rank has one,
   without a table: fewer numbers, and each element's sum is its own.

``index=bloom`` takes one round, and is for sums by MPI's own operations, or by a switch. Nothing is known of the union
before, so sizes follow from ``density``, the share of the elements that the union is expected to have, and ``fpr``.
Filters (:mod:`.bloom`) are OR-ed and tables summed at the same time: two arrays, each by an operation of MPI's own.
(One array for both would take an operation of ours, which no switch has, or filters as fields of integers or floats
that are summed: 3 to 8 times as long.) Elements that a filter takes for some of the union's are in no rank's table.
They take part in peeling and come out as zeros: exactly, because a value that is read beside much larger ones and can
be their rounding counts as zero (:func:`~.sketch_sums.peel`); only where peeling ends early they get estimates, too.
Where the union has more elements than ``density``, false positives become many and tables too full: peeling collapses,
and most of the sum is estimates. Each part is judged alone: non-zeros that lie together may fill some. A table has
blocks of one element. Where ``density`` and ``fpr`` make table and filter take half of the elements' bytes or more, all
elements are sent as they are, without an index. The fewest bytes are at an ``fpr`` of about ``density / 25``.

The sum is float addition's in another order: an element's error is that of rounding the largest of the values
that share counters with it. A NaN or an infinity may spoil elements that share counters with it, too. Where nothing
else must sum, ``form=packed`` is shorter.

A message is of one tensor, whose receiver knows where the values are: it holds no table but the values themselves,
and decodes to the same bits, whatever they are.

Payload: uint32 form, uint32 zero, uint64 k; form 0: all values (k = count); form 1: the bitmap of the k elements
whose bits are not all zero, 64 to a little-endian word, then their values, both in the message's dtype.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat, byte_view
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import parameters
from hybridcomp.codecs.linear.base import Array, LinearCodec, Reduced, Reduction, Round, Terms
from hybridcomp.codecs.linear.bloom import insert, query, words_of
from hybridcomp.codecs.linear.sketch_plan import Part, plan_expected, plan_union, runs_of
from hybridcomp.codecs.linear.sketch_sums import fill, read
from hybridcomp.codecs.table import register
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

PREFIX = struct.Struct("<IIQ")
DENSE, PACKED = 0, 1
_FORMS = ("sketch", "packed")
_PARAMETERS_OF = {"bitmap": ("form", "lanes"), "bloom": ("fpr", "density")}


@register
class SketchCodec(LinearCodec):
    """Codec that sums sparse tensors in the compressed domain.

    Args:
        load: elements per counter that a table begins with, or is made for; from 0.05 to 1.
        form: form of a reduction: ``sketch`` or ``packed``.
        lanes: elements of a block; a power of two from 1 to 4096. A Bloom filter knows elements, not blocks.
        seed: seed of the hashes, from 0 to 2^63 - 1.
        index: index of the non-zeros: ``bitmap`` or ``bloom``.
        fpr: share of the other elements that a Bloom filter may take for some of the union's, if that is as dense as
            expected; from 1e-9 to below 1.
        density: share of the elements, of each 262,144, that the union of the ranks' is expected to have, for
            ``index=bloom``: above 0, 1 at most.

    Raises:
        ValueError: a parameter is out of its range, or belongs to the other index.
    """

    name = "sketch"
    wire_id = 34
    examples = (
        "sketch",
        "sketch:load=0.5:lanes=64:form=packed",
        "sketch:index=bloom:fpr=0.01:density=0.1",
    )
    fixed_size = False
    sums = 2
    seldom = frozenset({"form", "lanes", "seed", "index", "fpr", "density"})

    def __init__(
        self,
        load: float = 0.6,
        form: str = "sketch",
        lanes: int = 4,
        seed: int = 0,
        index: str = "bitmap",
        fpr: float = 0.001,
        density: float = 0.02,
    ) -> None:
        if not _is_number(load) or not 0.05 <= load <= 1:
            raise ValueError(f"load must be a number from 0.05 to 1, not {load!r}")
        self._load = float(load)
        self._form = checks.choice("form", form, _FORMS)
        self._lanes = checks.integer("lanes", lanes, 1, 4096)
        if lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two from 1 to 4096, not {lanes!r}")
        self._seed = checks.integer("seed", seed, 0, 2**63 - 1)
        self._index = checks.choice("index", index, tuple(_PARAMETERS_OF))
        if not _is_number(fpr) or not 1e-9 <= fpr < 1:
            raise ValueError(f"fpr must be a number from 1e-9 to below 1, not {fpr!r}")
        self._fpr, self._density = float(fpr), checks.number("density", density, most=1)
        self.fixed_sums = index == "bloom"
        defaults = parameters(type(self))
        for other, names in _PARAMETERS_OF.items():
            for name in names:
                if other != index and self.params[name] != defaults[name].default:
                    raise ValueError(f"{name} is a parameter of index={other}, not of index={index}")

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
    def index(self) -> str:
        """Return the index of the non-zeros: ``bitmap`` or ``bloom``."""
        return self._index

    @property
    def fpr(self) -> float:
        """Return the false-positive rate of a Bloom filter."""
        return self._fpr

    @property
    def density(self) -> float:
        """Return the share of the elements that a Bloom filter and its table are made for."""
        return self._density

    @property
    def params(self) -> dict[str, Any]:
        names = ("load", "form", "lanes", "seed", "index", "fpr", "density")
        return {name: getattr(self, f"_{name}") for name in names}

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
        """Reduce by way of the index, in two rounds or in one."""
        return self._reduce_filters(x, terms) if self._index == "bloom" else self._reduce_bitmaps(x, terms)

    def _reduce_bitmaps(self, x: Flat, terms: Terms) -> Reduction:
        """Sum the bitmaps, and the parts that :meth:`plan` makes of their union."""
        words = _non_zeros(x)
        mine = words.copy()
        yield Round(words, "or")
        parts = self.plan(words, x.size)
        sums = fill(parts, x, mine, words)
        yield Round(sums, "sum")
        return _result(x, terms, parts, words, sums, native.kernels().sketch_count(words, x.size))

    def _reduce_filters(self, x: Flat, terms: Terms) -> Reduction:
        """Sum the filters, and the parts that :meth:`expect` makes of the size."""
        parts, mine = self.expect(x.size, x.dtype.accumulator), _non_zeros(x)
        runs = runs_of(parts)
        filters, sums = insert(runs, mine), fill(parts, x, mine, mine)
        yield Round(filters, "or", beside=Round(sums, "sum"))
        words, held = query(runs, filters, x.size)
        return _result(x, terms, parts, words, sums, held)

    def plan(self, words: Array, n: int) -> list[Part]:
        """Plan how the parts of a tensor are sent once the union is known.

        Args:
            words: bitmap of the union's ``n`` elements, uint64.
            n: elements of the tensor.
        """
        return plan_union(words, n, form=self._form, load=self._load, lanes=self._lanes, seed=self._seed)

    def expect(self, n: int, kind: DType) -> list[Part]:
        """Plan how the parts of a tensor are sent with filters.

        Args:
            n: elements of the tensor.
            kind: dtype of the numbers that are summed.
        """
        return plan_expected(n, kind, density=self._density, rate=self._fpr, load=self._load, seed=self._seed)


def _non_zeros(x: Flat) -> Array:
    words = np.empty(words_of(x.size), np.uint64)
    native.kernels().sketch_mask(x.data, x.dtype, words)
    return words


def _result(x: Flat, terms: Terms, parts: list[Part], words: Array, sums: Array, count: int) -> Reduced:
    """Return the result of the reduction for the sums of all ranks; ``count`` elements should be recovered."""
    if terms.mean:
        sums /= sums.dtype.type(terms.ranks)
    total, remained = read(parts, words, sums, x.size)
    return Reduced(
        total, arrays.widen(x.data, x.dtype) if terms.own else None, 1 - remained / count if count else 1.0
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        payload: first bytes of the payload: the prefix.
        header: header of the message.

    Returns:
        The form and the number of values.

    Raises:
        WireError: the prefix and the header do not fit together.
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
