"""``lossless`` on a device: planes split and joined there, zstd by nvCOMP or, without it, by the host.

The host's zstd writes the CPU codec's bytes. nvCOMP is another encoder: its messages decode to the same values, and
are not the same bytes; the codec's level means nothing to it. The choice of planes to compress is the same.

Encoding and decoding wait for the device: zstd's sizes decide what comes next, and the host calls both libraries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridcomp import nvcomp
from hybridcomp.arrays import DType
from hybridcomp.codecs import lossless
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.lossless import CHUNK, LosslessCodec
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.errors import WireError
from hybridcomp.wire import Header

_THREADS = 256
_TILE = 4096  # words of a block at a time, and bytes of a warp's copy; kTile and kPiece of planes.cu
_WARPS = _THREADS // 32
_ALIGNMENT = nvcomp.ALIGNMENT
_HEAD = 18  # bytes of the longest header of a zstd frame
_Numbers = npt.NDArray[np.uint64]


class LosslessDriver(Driver):
    """The driver of ``lossless``."""

    def modules(self) -> tuple[str, ...]:
        return ("planes", "convert")

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        assert isinstance(codec, LosslessCodec)
        width, words = dtype.component_bytes, src.nbytes // dtype.component_bytes
        if not words:
            return 0
        chunks, rotate = -(-words // CHUNK), int(lossless.rotates(dtype))
        count = chunks * width
        data = src.view(np.uint8)
        stride = CHUNK if chunks > 1 else -(-words // _ALIGNMENT) * _ALIGNMENT
        chosen = queue.array(chunks, np.uint32)
        blocks = queue.blocks(chunks, 1, 8)
        queue.launch("planes", f"planes_sample_{width}", blocks, _THREADS, data, words, rotate, chosen)
        planes = queue.empty(count * stride)
        blocks = queue.blocks(words, _THREADS * 4)
        queue.launch("planes", f"planes_split_{width}", blocks, _THREADS, data, words, rotate, planes, stride)

        masks = queue.read(chosen)
        picked = np.flatnonzero(masks[:, None] >> np.arange(width, dtype=np.uint32) & 1)
        sizes = np.minimum(words - picked // width * CHUNK, CHUNK).astype(np.uint64)
        frames = np.zeros((2, count), np.uint64)
        on_device = nvcomp.compresses(queue.runtime)
        if on_device:
            contents = [
                planes[k * stride : k * stride + size]
                for k, size in zip(picked.tolist(), sizes.tolist(), strict=True)
            ]
            held = nvcomp.compress(queue, contents)
            frames[0, picked], frames[1, picked] = [f.ptr for f in held], [f.nbytes for f in held]
        else:
            begins = np.uint64(planes.ptr) + picked.astype(np.uint64) * np.uint64(stride)
            held = [_host_frames(codec, queue, picked, begins, sizes, width, frames)]
        table = _uploaded(queue, frames)
        moves, length = queue.array(3 * count, np.uint64), queue.array(1, np.uint64)
        queue.launch(
            "planes", "planes_table", 1, _THREADS, table, words, width, planes, stride, payload, moves, length
        )  # fmt: skip
        _copy(queue, moves, count, min(words, CHUNK))
        queue.start()  # the arrays that the kernels know by addresses in tables end here
        if on_device:
            queue.runtime.synchronize(queue.stream)  # nvCOMP frees its frames without the queue's order
        del held
        return length

    def check(self, header: Header, head: bytes) -> None:
        lossless.check_table_bytes(header)
        nbytes = 4 * lossless.plane_count(header.count, header.dtype)
        if nbytes <= len(head):  # else `decode` is the first to see all of it
            lossless.read_table(np.frombuffer(head[:nbytes], "<u4"), header)

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
        """Decode, waiting for the device; raise WireError where the CPU's decoder does."""
        kind = header.dtype
        width = kind.component_bytes
        count, words = lossless.plane_count(header.count, kind), header.count * kind.itemsize // width
        if not words:
            if header.payload:
                raise WireError(f"malformed lossless payload: {header.payload} bytes for no elements")
            return
        table = lossless.read_table(queue.read(payload[: 4 * count].view("<u4")), header)
        pointers = np.uint64(payload.ptr) + table.begins.astype(np.uint64)
        framed = np.flatnonzero(table.kinds)
        held: list[DeviceArray] = []
        if framed.size:
            if queue.read(queue.status)[0]:
                return  # a damaged message: its frames must not be decompressed
            held = _contents(queue, pointers[framed], table.sizes[framed], table.whole[framed], framed)
            pointers[framed] = [array.ptr for array in held]
        add_here = add and dtype is kind.accumulator
        target = out
        if not add_here and (dtype is not kind or add):
            target = queue.array(header.count, kind.storage)
        name = f"planes_add_{suffix(kind)}" if add_here else f"planes_join_{width}"
        planes, blocks = _uploaded(queue, pointers), queue.blocks(words, _TILE)
        rotate = int(lossless.rotates(kind))
        queue.launch("planes", name, blocks, _THREADS, planes, words, rotate, target, queue.status)
        queue.start()  # see encode
        if held and nvcomp.decompresses(queue.runtime):
            queue.runtime.synchronize(queue.stream)  # nvCOMP frees its planes without the queue's order
        if target is not out:
            convert(queue, target, kind, out, dtype, header.count, add=add)


# -- frames ----------------------------------------------------------------------------------------------------


def _host_frames(
    codec: LosslessCodec,
    queue: Queue,
    picked: npt.NDArray[np.int64],
    begins: _Numbers,
    sizes: _Numbers,
    width: int,
    frames: _Numbers,
) -> DeviceArray:
    """Compress planes by the host's zstd, as the CPU's codec does; return their buffer, and fill ``frames``."""
    packed, slots = _gathered(queue, begins, sizes)
    host = queue.read(packed)
    levels: list[int | None] = []
    period, found = -1, []
    for k, slot, size in zip(picked.tolist(), slots.tolist(), sizes.tolist(), strict=True):
        if k // width // lossless.TRIAL_CHUNKS != period:
            period, levels = k // width // lossless.TRIAL_CHUNKS, [None] * width
        found.append(codec.frame(host[slot : slot + size], levels, k % width))
    lengths = np.array([len(frame) for frame in found], np.uint64)
    places = _slots(lengths)
    buffer = queue.empty(int(places[-1] + lengths[-1]) if found else 0)
    data = np.zeros(buffer.nbytes, np.uint8)
    for place, frame in zip(places.tolist(), found, strict=True):
        data[place : place + len(frame)] = np.frombuffer(frame, np.uint8)
    queue.write(buffer, data)
    frames[0, picked], frames[1, picked] = np.uint64(buffer.ptr) + places, lengths
    return buffer


def _contents(
    queue: Queue,
    begins: _Numbers,
    sizes: npt.NDArray[np.uint32],
    whole: npt.NDArray[np.uint32],
    numbers: npt.NDArray[np.int64],
) -> list[DeviceArray]:
    """Decompress the planes that frames hold, by nvCOMP where it may be used, else on the host."""
    packed, slots = _gathered(queue, begins, sizes.astype(np.uint64))
    results: list[DeviceArray | None] = [None] * len(sizes)
    if nvcomp.decompresses(queue.runtime):
        heads, at = _gathered(queue, begins, np.minimum(sizes, _HEAD).astype(np.uint64))
        host = queue.read(heads)
        mine = []
        for i, (begin, size) in enumerate(zip(at.tolist(), sizes.tolist(), strict=True)):
            frame = host[begin : begin + min(size, _HEAD)]
            if nvcomp.reads(lossless.check_frame(frame, int(whole[i]), int(numbers[i]))):
                mine.append(i)
        frames = [packed[int(slots[i]) : int(slots[i]) + int(sizes[i])] for i in mine]
        try:
            found = nvcomp.decompress(queue, frames)
        except (RuntimeError, ValueError):
            found = []  # the host's zstd says what is wrong with them
        for i, plane in zip(mine, found, strict=False):
            if plane.nbytes == whole[i]:
                results[i] = plane
    left = [i for i, plane in enumerate(results) if plane is None]
    if left:
        places = _slots(whole[left].astype(np.uint64))
        buffer = queue.empty(int(places[-1]) + int(whole[left[-1]]))
        data, host = np.zeros(buffer.nbytes, np.uint8), queue.read(packed)
        for i, place in zip(left, places.tolist(), strict=True):
            size = int(whole[i])
            frame = host[int(slots[i]) : int(slots[i]) + int(sizes[i])]
            lossless.check_frame(frame, size, int(numbers[i]))
            data[place : place + size] = np.frombuffer(lossless.decompressed(frame, size), np.uint8)
            results[i] = buffer[place : place + size]
        queue.write(buffer, data)
    return [plane for plane in results if plane is not None]


# -- lists of addresses ----------------------------------------------------------------------------------------


def _slots(sizes: _Numbers) -> _Numbers:
    """Return the aligned offsets of runs of these sizes, one after the other."""
    rounded = -(-sizes.astype(np.int64) // _ALIGNMENT) * _ALIGNMENT
    return (np.cumsum(rounded) - rounded).astype(np.uint64)


def _gathered(queue: Queue, begins: _Numbers, sizes: _Numbers) -> tuple[DeviceArray, _Numbers]:
    """Copy runs of bytes to one buffer; return it, and the offset in it at which each begins."""
    slots = _slots(sizes)
    if not sizes.size:
        return queue.empty(0), slots
    buffer = queue.empty(int(slots[-1] + sizes[-1]))
    moves = _uploaded(queue, np.concatenate([begins, np.uint64(buffer.ptr) + slots, sizes]))
    _copy(queue, moves, sizes.size, int(sizes.max()))
    return buffer, slots


def _copy(queue: Queue, moves: DeviceArray, count: int, longest: int) -> None:
    """Start to copy ``count`` runs of bytes: ``moves`` has all sources, then all targets, then all sizes."""
    blocks = queue.blocks(count * -(-longest // _TILE), _WARPS)
    queue.launch("planes", "planes_copy", blocks, _THREADS, moves, count, longest, None)


def _uploaded(queue: Queue, numbers: _Numbers) -> DeviceArray:
    array = queue.array(numbers.size, np.uint64)
    queue.write(array, numbers)
    return array
