"""``sketch`` on a device.

A message's form follows from how many elements are not zero: the kernels count, and decide. In a reduction the
device makes the bitmap and Bloom filters, asks these for all elements, packs the values that travel and puts the sums
in their places; tables are planned, filled and peeled by the CPU's kernels, whose order the sums' bits depend on, from
packed values in host memory: a table is larger than they are.
"""

from __future__ import annotations

import numpy as np

from hybridcomp import native
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import suffix
from hybridcomp.codecs.device.linear import base
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.linear.base import Array, Reduced, Reduction, Round, Terms
from hybridcomp.codecs.linear.bloom import PART, Run, words_of
from hybridcomp.codecs.linear.sketch import DENSE, PREFIX, SketchCodec, open_prefix
from hybridcomp.codecs.linear.sketch_plan import Part, runs_of
from hybridcomp.codecs.linear.sketch_sums import fold, peel, placed
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

_THREADS = 256
_SCAN_THREADS = 1024
_TILE = 16384  # elements of a block
_ANY = 2**64 - 1


class SketchDriver(base.LinearDriver):
    """The driver of ``sketch``."""

    def modules(self) -> tuple[str, ...]:
        return ("sketch", "bloom", "convert")

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        words, counts = _mask(queue, src)
        total = _scan(queue, counts, src.size)
        length = queue.array(1, np.uint64)
        name = f"sketch_pack_{src.dtype.itemsize}"
        args = (words, src, src.size, counts, total, payload, length)
        queue.launch("sketch", name, max(1, _blocks(queue, src.size)), _THREADS, *args)
        return length

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
        form, k = open_prefix(head, header)
        body, n = payload[PREFIX.size :], header.count
        if form == DENSE:
            convert(queue, body, header.dtype, out, dtype, n, add=add)
            return
        bitmap = 8 * words_of(n)
        _scatter(queue, body[:bitmap], body[bitmap:], k, header.dtype, out, dtype, add=add)

    def finds_faults(self) -> bool:
        return True

    def reduce(self, codec: Codec, x: Flat, terms: Terms, staging: base.Staging) -> Reduction:
        """Reduce as on the CPU."""
        assert isinstance(codec, SketchCodec)
        if codec.index == "bloom":
            return _reduce_filters(codec, x, terms, staging)
        return _reduce_bitmaps(codec, x, terms, staging)


def _reduce_bitmaps(codec: SketchCodec, x: Flat, terms: Terms, staging: base.Staging) -> Reduction:
    """Sum the bitmaps, and the parts that are planned from their union."""
    bitmap, _ = _mask(staging.queue, x.data)
    mine, _ = staging.fetch(bitmap)
    words, ready = staging.fetch(bitmap)
    yield Round(words, "or", ready)
    parts = codec.plan(words, x.size)
    sums = _own(parts, mine, words, x, staging)
    yield sums
    return _result(x, terms, staging, parts, words, sums.array)


def _reduce_filters(codec: SketchCodec, x: Flat, terms: Terms, staging: base.Staging) -> Reduction:
    """Sum the filters, and the parts that are planned from the size."""
    queue, n = staging.queue, x.size
    parts = codec.expect(n, x.dtype.accumulator)
    runs = runs_of(parts)
    bitmap, _ = _mask(queue, x.data)
    mine, ready = staging.fetch(bitmap)
    filters, made = staging.fetch(_insert(queue, runs, bitmap))
    ready.wait()
    sums = _own(parts, mine, mine, x, staging)
    yield Round(filters, "or", made, beside=sums)
    words, ready = staging.fetch(_query(queue, runs, staging.send(filters), n))
    ready.wait()
    return _result(x, terms, staging, parts, words, sums.array)


def _own(parts: list[Part], mine: Array, union: Array, x: Flat, staging: base.Staging) -> Round:
    """Return the round of the numbers that this rank gives."""
    kind = x.dtype.accumulator
    packed, ready = staging.fetch(_gather(staging.queue, staging, _travelling(parts, mine, union), x))
    if not any(part.table for part in parts):
        return Round(packed, "sum", ready)
    ready.wait()
    sums = staging.host(sum(part.size for part in parts), kind.storage)
    _fill(parts, mine, packed, sums, kind)
    return Round(sums, "sum")


def _result(
    x: Flat, terms: Terms, staging: base.Staging, parts: list[Part], words: Array, sums: Array
) -> Reduced:
    """Return the result of the reduction for the sums of all ranks.

    Args:
        words: bitmap of the elements that tables hold and packed parts have, uint64.
    """
    kernels, queue, kind, n = native.kernels(), staging.queue, x.dtype.accumulator, x.size
    if terms.mean:
        sums /= sums.dtype.type(terms.ranks)
    result, remained = _travelling(parts, words, words), 0
    values = sums
    if any(part.table for part in parts):
        values = staging.host(kernels.sketch_count(result, n), kind.storage)
        remained = _read(parts, words, sums, values, kind)
    total = queue.array(n, kind.storage)
    count = kernels.sketch_count(words, n)
    there = staging.send_copy(result).view(np.uint8)
    _scatter(queue, there, staging.send(values).view(np.uint8), values.size, kind, total, kind)
    own = base.widened(queue, x) if terms.own else None
    return Reduced(total, own, 1 - remained / count if count else 1.0)


# -- kernels ---------------------------------------------------------------------------------------------------


def _tiles(n: int) -> int:
    return -(-n // _TILE)


def _blocks(queue: Queue, n: int) -> int:
    return queue.blocks(n, _TILE)


def _mask(queue: Queue, src: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """Return the bitmap of the elements whose bits are not all zero, and the number of bits of each tile."""
    words = queue.array(words_of(src.size), np.uint64)
    counts = queue.array(_tiles(src.size), np.uint64)
    name = f"sketch_mask_{src.dtype.itemsize}"
    queue.launch("sketch", name, _blocks(queue, src.size), _THREADS, src, src.size, words, counts)
    return words, counts


def _count(queue: Queue, words: DeviceArray, n: int) -> DeviceArray:
    """Count the bits of each tile; set the status where one is past the end."""
    counts = queue.array(_tiles(n), np.uint64)
    blocks = _blocks(queue, n)
    queue.launch("sketch", "sketch_count", blocks, _THREADS, words, n, counts, queue.status)
    return counts


def _scan(queue: Queue, counts: DeviceArray, n: int, expected: int = _ANY) -> DeviceArray:
    """Replace each tile's count by the index at which its values begin; return how many values there are.

    Sets the status where that is not the expected number.
    """
    total = queue.array(1, np.uint64)
    args = (counts, _tiles(n), total, expected, queue.status)
    queue.launch("sketch", "sketch_scan", 1, _SCAN_THREADS, *args)
    return total


def _gather(queue: Queue, staging: base.Staging, words: Array, x: Flat) -> DeviceArray:
    """Pack the elements of a bitmap, in the accumulator's type."""
    n, kind = x.size, x.dtype.accumulator
    k = native.kernels().sketch_count(words, n)
    there = staging.send_copy(words)
    counts = _count(queue, there, n)
    _scan(queue, counts, n)
    values = queue.array(k, x.dtype.storage)
    name = f"sketch_gather_{x.dtype.itemsize}"
    queue.launch("sketch", name, _blocks(queue, n), _THREADS, there, x.data, n, counts, values)
    if x.dtype is kind:
        return values
    wide = queue.array(k, kind.storage)
    convert(queue, values, x.dtype, wide, kind, k)
    return wide


def _scatter(
    queue: Queue,
    words: DeviceArray,
    values: DeviceArray,
    k: int,
    source: DType,
    out: DeviceArray,
    dtype: DType,
    *,
    add: bool = False,
) -> None:
    """Write ``k`` packed values of ``source`` to the places of a bitmap.

    Sets the status where the bitmap does not have k bits.
    """
    n = out.size
    counts = _count(queue, words, n)
    _scan(queue, counts, n, k)
    name = f"sketch_scatter_{suffix(source)}_{suffix(dtype)}{'_add' if add else ''}"
    args = (words, n, counts, values, out, queue.status)
    queue.launch("sketch", name, _blocks(queue, n), _THREADS, *args)


def _insert(queue: Queue, runs: list[Run], bitmap: DeviceArray) -> DeviceArray:
    """Return the filters of the elements of a bitmap."""
    filters = queue.zeros(8 * (runs[-1].words.stop if runs else 0)).view(np.uint64)
    for run in runs:
        words = bitmap[run.bitmap]
        _launch(queue, "bloom_insert", 2 * words.size, words, run, filters[run.words])
    return filters


def _query(queue: Queue, runs: list[Run], filters: DeviceArray, n: int) -> DeviceArray:
    """Return the bitmap of the elements that filters may hold."""
    bitmap = queue.zeros(8 * words_of(n)).view(np.uint64)
    for run in runs:
        _launch(queue, "bloom_query", run.size, filters[run.words], run, bitmap[run.bitmap])
    return bitmap


def _launch(queue: Queue, name: str, items: int, source: DeviceArray, run: Run, out: DeviceArray) -> None:
    how = run.filter
    args = (source, run.size, PART, how.bits, how.hashes, how.seed, out)
    queue.launch("bloom", name, queue.blocks(items, _THREADS), _THREADS, *args)


# -- tables, in host memory ------------------------------------------------------------------------------------


def _travelling(parts: list[Part], table: Array, packed: Array) -> Array:
    """Return a bitmap of the elements whose values cross to the host.

    They are those of ``table`` where a part has one, those of ``packed``, or all.
    """
    words = packed.copy()
    for part in parts:
        if part.table is not None:
            words[part.words] = table[part.words]
        elif not part.packed:
            words[part.words] = ~np.uint64(0)
            past = part.elements.stop % 64
            if past:
                words[part.words.stop - 1] = np.uint64((1 << past) - 1)
    return words


def _fill(parts: list[Part], mine: Array, packed: Array, sums: Array, kind: DType) -> None:
    """Write the values that ranks sum, in tables or as they are, from those that crossed to the host."""
    kernels = native.kernels()
    taken = 0
    for part, there in placed(parts, sums):
        if part.table is None:
            there[:] = packed[taken : taken + part.size]
            taken += part.size
            continue
        n, words = part.elements.stop - part.elements.start, mine[part.words]
        k = kernels.sketch_count(words, n)
        values = np.empty(n, kind.storage)
        kernels.sketch_scatter(words, packed[taken : taken + k], values, kind, False)
        taken += k
        there[:] = 0
        fold(words, Flat(values, kind, values.shape, True, False), part.table, there)


def _read(parts: list[Part], union: Array, sums: Array, values: Array, kind: DType) -> int:
    """Read the packed values of the result; return how many are only estimates."""
    kernels = native.kernels()
    taken = remained = 0
    for part, there in placed(parts, sums):
        if part.table is None:
            values[taken : taken + part.size] = there
            taken += part.size
            continue
        n, words = part.elements.stop - part.elements.start, union[part.words]
        k = kernels.sketch_count(words, n)
        dense = np.zeros(n, kind.storage)
        remained += peel(words, part.table, there, dense, zeros=part.filter is not None)
        kernels.sketch_gather(words, dense, kind, values[taken : taken + k])
        taken += k
    return remained
