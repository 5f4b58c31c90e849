"""``topk``, ``threshold``, ``sidco`` on a device.

A warp takes a tile of 1,024 elements. One pass over the tensor, the filter, writes the candidates of each tile to
the tile's slot; the steps after it read the slots, and the tensor again only where a slot was too small or a sample
misled. Each launch leaves its findings on the device for the next one (``Search`` of :file:`sparse/sparse.cuh`).
The host waits only where another codec takes values whose number depends on the data (``threshold``, ``sidco``): for
that number.
"""

from __future__ import annotations

import abc
import math
import struct
from collections.abc import Sequence

import numpy as np

from hybridcomp import wire
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, driver_of, suffix
from hybridcomp.codecs.device.messages import (
    PAYLOAD_HEAD,
    convert,
    decode_opened,
    encode_into,
    open_message,
)
from hybridcomp.codecs.none import NoneCodec
from hybridcomp.codecs.sparse.base import INDEX_BLOCK, PREFIX, SparseCodec, check_values, open_prefix
from hybridcomp.codecs.sparse.sidco import SIDCoCodec
from hybridcomp.codecs.sparse.threshold import ThresholdCodec
from hybridcomp.codecs.sparse.topk import TopKCodec
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES, Header

_TILE = 1024
_THREADS = 256
_TILES_PER_GRID_BLOCK = _THREADS // 32
_BINS = 2048 + 1
_SEARCH_WORDS, _COUNT, _BYTES = 25, 11, 13  # number of words of Search, and the indices of two
_SEARCHES = {16: 2, 32: 3, 64: 6}  # steps that find any key of so many bits
_MOST_ROOM = 768  # elements of a tile's slot; where more would be taken the tensor is read again
_SAMPLE = 16384
_GROUP = 32  # neighbours of a sample
_READING_WORDS = 5  # words of Reading of sparse_read.cu
_SECTIONS = "sections"  # forks of a queue that check messages
# What the host knows of a payload that this device has written: the kernels read its prefix themselves (kOwn of
# sparse_read.cu). The heads of messages that have come are longer.
_OWN = PREFIX.pack(2**64 - 1, 2**64 - 1)


def _divide(n: int, by: int) -> int:
    return -(-n // by)


class _Selection:
    """The candidates of a tensor, and the state of the selection of those that are sent.

    Args:
        src: the tensor.
        dtype: dtype of the tensor.
        share: share of the elements that are expected to be candidates.
        queue: queue to launch on.
    """

    def __init__(self, src: DeviceArray, dtype: DType, share: float, queue: Queue) -> None:
        self.src, self.dtype, self.queue, self.n = src, dtype, queue, src.size
        self.bits = 8 * dtype.itemsize
        self.tiles, self.blocks = _divide(self.n, _TILE), _divide(self.n, INDEX_BLOCK)
        room = _divide(int(2 * _TILE * share) + 32, 32) * 32
        self.room = room if room <= _MOST_ROOM else 0
        self.state = queue.zero_words(2 * (_SEARCH_WORDS + _BINS)).view(np.uint64)
        self.histogram = self.state[_SEARCH_WORDS:]
        self._slots = (
            queue.array(self.tiles * self.room, f"u{dtype.itemsize}"),
            queue.array(self.tiles * self.room, np.uint16),
            self.room,
            queue.array(self.tiles, np.uint32),
        )
        self._blocks = (
            queue.array(self.tiles, np.uint32),
            queue.array(self.blocks, np.uint32),
            queue.array(self.blocks, np.uint32),
            queue.array(self.blocks, np.uint64),
            queue.array(self.blocks, np.uint64),
        )

    def launch(
        self, module: str, kernel: str, *args: int | DeviceArray | None, blocks: int | None = None
    ) -> None:
        """Start a kernel that reads tiles, with a warp for each eight of them unless ``blocks`` gives the grid."""
        if blocks is None:
            blocks = max(1, self.queue.blocks(self.tiles, 8 * _TILES_PER_GRID_BLOCK))
        tiles = (self.src, self.n, *self._slots, self.state)
        self.queue.launch(module, f"sparse_{kernel}_{self.bits}", blocks, _THREADS, *tiles, *args)

    def filter(self, kernel: str, *args: int | DeviceArray | None) -> None:
        """Select the candidates, by a kernel that reads the whole tensor.

        Five blocks fit a multiprocessor at once.
        """
        blocks = max(1, self.queue.blocks(self.tiles, _TILES_PER_GRID_BLOCK, 5))
        self.launch("sparse_select", kernel, *args, blocks=blocks)

    def search(self, *, zeros: bool) -> None:
        """Find the limiting key if the steps before left it to be found."""
        for _ in range(_SEARCHES[self.bits]):
            self.launch("sparse_select", "search", self.histogram, int(zeros))

    def count(self, payload: DeviceArray) -> None:
        """Write the prefix and the counts of the index section."""
        blocks = max(1, self.queue.blocks(self.blocks, 1))
        self.launch("sparse_write", "count", *self._blocks, payload, blocks=blocks)

    def write(self, payload: DeviceArray, values: DeviceArray | None) -> None:
        """Write the rest of the index section, and the values to their place in the payload, or to ``values``."""
        blocks = self.queue.blocks(self.blocks, 1)
        self.launch("sparse_write", "write", *self._blocks, payload, values, blocks=blocks)


class _SparseDriver(Driver):
    """The driver that all sparse codecs share."""

    def modules(self) -> tuple[str, ...]:
        return ("sparse_select", "sparse_write", "sparse_read", "convert")

    @abc.abstractmethod
    def select(self, codec: Codec, src: DeviceArray, dtype: DType, queue: Queue) -> _Selection:
        """Start to select the elements that are sent."""

    def sent(self, codec: SparseCodec, selection: _Selection) -> int:
        """Return the number of elements that are sent; waits for the device."""
        return int(selection.queue.read(selection.state[_COUNT : _COUNT + 1])[0])

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        """Encode as :meth:`Driver.encode` does.

        Waits for the number of values, if it depends on the data and another codec takes them.
        """
        assert isinstance(codec, SparseCodec)
        selection = self.select(codec, src, dtype, queue)
        selection.count(payload)
        values_codec = codec.values
        if isinstance(values_codec, NoneCodec):
            selection.write(payload, None)
            most = codec.most(src.size) * dtype.itemsize
            blocks = max(1, queue.blocks(most, 16384, 4))
            args = (payload, selection.state, int(dtype), dtype.itemsize, values_codec.params_hash)
            queue.launch("sparse_write", "sparse_seal", blocks, _THREADS, *args)
        else:
            k = self.sent(codec, selection)
            values = queue.array(k, dtype.storage)
            selection.write(payload, values)
            buffer = queue.empty(values_codec.bound(k, dtype))
            encoded = encode_into(values_codec, Flat(values, dtype, (k,), True, False), buffer, queue)
            size = buffer.size if encoded.size is None else encoded.size
            blocks = queue.blocks(size, 4 * _THREADS)
            place = (payload, selection.state, buffer, size, encoded.total)
            queue.launch("sparse_write", "sparse_place", blocks, _THREADS, *place)
            queue.launch("sparse_write", "sparse_length", 1, 32, selection.state, size, encoded.total)
        return selection.state[_BYTES : _BYTES + 1]

    # -- decode ----------------------------------------------------------------------------------------------

    def head(self, codec: Codec) -> bytes | None:
        assert isinstance(codec, SparseCodec)
        return _OWN if isinstance(codec.values, NoneCodec) else None

    def reads_lengths(self, codec: Codec) -> bool:
        return self.head(codec) is not None

    def check(self, header: Header, head: bytes) -> None:
        if head == _OWN:
            return
        _, index_bytes = open_prefix(header, head)
        inner, inner_head = _inner(header, head, index_bytes)
        check_values(header, head, inner)
        driver_of(inner.codec).check(inner, inner_head)

    def finds_faults(self) -> bool:
        return True

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
        if head == _OWN and dtype is not header.dtype:
            assert not add  # a sum takes its own message when it has been sent
            values = queue.array(out.size, header.dtype.storage)
            self._read([header], [head], [payload], values, header.dtype, False, queue)
            convert(queue, values, header.dtype, out, dtype, out.size)
        else:
            self._read([header], [head], [payload], out, dtype, add, queue)

    def decode_sum(
        self,
        headers: Sequence[Header],
        heads: Sequence[bytes],
        payloads: Sequence[DeviceArray],
        acc: DeviceArray,
        dtype: DType,
        queue: Queue,
    ) -> None:
        self._read(headers, heads, payloads, acc, dtype, True, queue)

    def _read(
        self,
        headers: Sequence[Header],
        heads: Sequence[bytes],
        payloads: Sequence[DeviceArray],
        out: DeviceArray,
        dtype: DType,
        add: bool,
        queue: Queue,
    ) -> None:
        """Check messages of as many elements as ``out`` has beside each other, then write or add their values."""
        n, status = out.size, queue.status
        readings = queue.array(_READING_WORDS * len(headers), np.uint64)
        held = []
        for i, each in enumerate(zip(headers, heads, payloads, strict=True)):
            reading = readings[_READING_WORDS * i : _READING_WORDS * (i + 1)]
            held.append(self._check_sections(*each, dtype, reading, queue.fork(_SECTIONS)))
        kernel = f"sparse_{'add' if add else 'scatter'}_{8 * dtype.itemsize}"
        grid = queue.blocks(_divide(n, _TILE), _TILES_PER_GRID_BLOCK)
        args = (readings, len(headers), n, out, status)
        queue.launch("sparse_read", kernel, grid, _THREADS, *args, held=held)

    def _check_sections(
        self,
        header: Header,
        head: bytes,
        payload: DeviceArray,
        dtype: DType,
        reading: DeviceArray,
        queue: Queue,
    ) -> list[DeviceArray]:
        """Write a message's ``Reading`` of :file:`sparse/sparse_read.cu`; return the arrays that it points to."""
        k, index_bytes = PREFIX.unpack_from(head)
        values = None  # as they are; the message's CRC covers them
        inner, inner_head = (None, b"") if head == _OWN else _inner(header, head, index_bytes)
        if inner is not None and (inner.codec != NoneCodec.wire_id or dtype is not header.dtype):
            start = PREFIX.size + index_bytes
            message = queue.empty(HEADER_BYTES + inner.payload)
            queue.copy(message, payload[start : start + message.size])
            open_message(queue, message)
            values = queue.array(k, dtype.storage)
            decode_opened(inner, inner_head, message, values, dtype, queue)
        n, blocks = header.count, _divide(header.count, INDEX_BLOCK)
        firsts, sections = queue.array(blocks, np.uint64), queue.array(blocks, np.uint64)
        starts = queue.array(blocks * (INDEX_BLOCK // _TILE), np.uint32)
        found = (values, firsts, sections, starts)
        args = (payload, n, k, index_bytes, *found, reading, queue.status)
        queue.launch("sparse_read", "sparse_sections", 1, _THREADS, *args)
        held = [payload, *filter(None, found)]
        grid = queue.blocks(blocks, 1)
        queue.launch("sparse_read", "sparse_check", grid, _THREADS, n, reading, queue.status, held=held)
        return held


class TopKDriver(_SparseDriver):
    """The driver of ``topk``."""

    def select(self, codec: Codec, src: DeviceArray, dtype: DType, queue: Queue) -> _Selection:
        assert isinstance(codec, TopKCodec)
        n, k = src.size, codec.k(src.size)
        selection = _Selection(src, dtype, k / max(n, 1), queue)
        if n:
            sample = (src, n, *_guess(n, k), selection.state)
            queue.launch("sparse_select", f"sparse_sample_{selection.bits}", 1, 1024, *sample)
        selection.filter("filter", selection.histogram, k)
        selection.search(zeros=True)
        return selection

    def sent(self, codec: SparseCodec, selection: _Selection) -> int:
        return codec.most(selection.n)

    def fills_bound(self, codec: Codec) -> bool:
        assert isinstance(codec, TopKCodec)
        return codec.values.fixed_size  # the number of values is known, and few sections are bitmaps


class ThresholdDriver(_SparseDriver):
    """The driver of ``threshold``."""

    def modules(self) -> tuple[str, ...]:
        return (*super().modules(), "sparse_limit")

    def select(self, codec: Codec, src: DeviceArray, dtype: DType, queue: Queue) -> _Selection:
        assert isinstance(codec, ThresholdCodec)
        selection = _Selection(src, dtype, 1 / 24, queue)
        limit = codec.abs if codec.rel is None else codec.rel
        assert limit is not None
        (raw,) = struct.unpack("<Q", struct.pack("<d", limit))
        if codec.rel is None:
            queue.launch("sparse_limit", "sparse_limit", 1, 32, selection.state, raw, int(dtype))
        else:
            sums = queue.array(selection.blocks, np.float64)
            blocks = max(1, queue.blocks(selection.blocks, 1))
            kernel = f"sparse_mean_square_{suffix(dtype)}"
            queue.launch(
                "sparse_limit", kernel, blocks, _THREADS + 32, src, src.size, sums, selection.state, raw
            )
        selection.filter("reach")
        return selection


class SIDCoDriver(_SparseDriver):
    """The driver of ``sidco``."""

    def modules(self) -> tuple[str, ...]:
        return (*super().modules(), "sparse_fit")

    def select(self, codec: Codec, src: DeviceArray, dtype: DType, queue: Queue) -> _Selection:
        assert isinstance(codec, SIDCoCodec)
        n, k, stages = src.size, codec.k(src.size), codec.stages
        selection = _Selection(src, dtype, 2 * k / max(n, 1), queue)
        state = selection.state
        if n:
            groups = _sample_groups(n, k, stages)
            size = groups * _GROUP or n
            stride = _divide(size, 16)
            keys = queue.array(2 * 16 * stride, "u8" if dtype is DType.FLOAT64 else "u4")
            sample = (src, n, groups, stride, keys, state)
            blocks = queue.blocks(stride * 16, _THREADS)
            queue.launch("sparse_fit", f"sparse_fit_sample_{suffix(dtype)}", blocks, _THREADS, *sample)
            kernel = "sparse_fit_64" if dtype is DType.FLOAT64 else "sparse_fit_32"
            fit = (keys, n, k, size, stride, stages, codec.distribution, int(dtype), state)
            queue.launch("sparse_fit", kernel, 1, 512, *fit)
            selection.filter("reach")
        most = codec.most(n)
        least = 0 if stages else k - k // 5
        goal = (k, least, most)
        queue.launch("sparse_fit", "sparse_begin", 1, 32, state, *goal, stages, int(dtype))
        if n and not stages:  # three stages nearly always suffice
            for grid in (None, None, None, 1):
                selection.launch("sparse_fit", "refine", *goal, int(dtype), blocks=grid)
        selection.search(zeros=False)
        return selection


def _inner(header: Header, head: bytes, index_bytes: int) -> tuple[Header, bytes]:
    """Return the header of the values' message and the first bytes of its payload; raise WireError if it is none."""
    room = header.payload - PREFIX.size - index_bytes
    begin = head[min(PAYLOAD_HEAD, header.payload) :][:room]
    inner = wire.peek(np.frombuffer(begin, np.uint8), room)
    return inner, begin[HEADER_BYTES : HEADER_BYTES + inner.payload]


def _guess(n: int, k: int) -> tuple[int, int, int]:
    """Return how many groups of neighbours to look at for the k-th largest of n; 0: all elements.

    The other numbers are how many elements of that sample shall reach the lower limit, and the upper one: between
    them the k-th nearly always lies.
    """
    if n <= _SAMPLE:
        return 0, k, k
    share = k / n
    expected = share * _SAMPLE
    margin = 4 * math.sqrt(expected * (1 - share)) + 8  # it is about binomial: four deviations and a few more
    first = int(expected + margin + 1) if expected + margin < _SAMPLE else 0
    return _SAMPLE // _GROUP, first, int(expected - margin) if expected > margin + 1 else 0


def _sample_groups(n: int, k: int, stages: int) -> int:
    """Return the number ``sample_groups`` of :file:`hybridcomp/sparse.hpp`."""
    selected, least, share = (512, 16384, 8) if stages else (32, 2048, 32)
    if n <= 2 * least:
        return 0
    return max(min((n // k + 1) * selected, n // share), least) // _GROUP
