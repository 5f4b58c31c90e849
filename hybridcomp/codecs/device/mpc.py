"""``mpc`` on a device."""

from __future__ import annotations

import struct

import numpy as np

from hybridcomp.arrays import DType
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.mpc import MPCCodec, word_bytes
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

_CHUNK = 1024  # words; kMpcChunk of mpc.hpp
_THREADS = 128
_WARPS = _THREADS // 32  # chunks of a block at a time
_GROUP = 128  # chunks whose sizes are summed together; kMpcGroup of mpc.cuh
_PREFIX = struct.Struct("<II")


class MPCDriver(Driver):
    """The driver of ``mpc``.

    Chunks are coded where they would be if none became smaller, and moved together afterwards.
    """

    def modules(self) -> tuple[str, ...]:
        return ("mpc", "convert")

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        assert isinstance(codec, MPCCodec)
        width, nbytes = word_bytes(dtype), src.nbytes
        words, chunks, others = _parts(nbytes, width)
        data = src
        if src.ptr % width:  # bytes, of which four make a word
            data = queue.empty(nbytes).view(src.dtype)
            queue.copy(data, src)
        scratch = queue.empty(chunks * _CHUNK * width)
        length = queue.array(1, np.uint64)
        name = f"mpc_encode_{width}"
        queue.launch("mpc", name, _blocks(queue, chunks), _THREADS, data, words, codec.lag, scratch, payload)
        sums = _sums(queue, payload, words, width, others, 0, length, None)
        blocks = max(1, _blocks(queue, chunks))
        queue.launch(
            "mpc",
            "mpc_place",
            blocks,
            _THREADS,
            data,
            nbytes,
            width,
            codec.lag,
            scratch,
            sums,
            length,
            payload,
        )
        return length

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
        kind = header.dtype
        width, nbytes = word_bytes(kind), header.count * kind.itemsize
        words, chunks, others = _parts(nbytes, width)
        lag, _ = _PREFIX.unpack_from(head)
        sums = _sums(queue, payload, words, width, others, header.payload, None, queue.status)
        add_here = add and dtype is kind.accumulator
        target = out
        if not add_here and (dtype is not kind or add or out.ptr % width):
            target = queue.array(header.count, kind.storage)
        name = f"mpc_add_{suffix(kind)}" if add_here else f"mpc_decode_{width}"
        blocks = _blocks(queue, chunks)
        queue.launch("mpc", name, blocks, _THREADS, payload, words, lag, sums, target, queue.status)
        tail = nbytes - words * width
        if tail:
            queue.launch(
                "convert", "copy_bytes", 1, 32,
                payload[payload.size - tail :], target.view(np.uint8)[nbytes - tail :], tail, queue.status,
            )  # fmt: skip
        if target is not out:
            convert(queue, target, kind, out, dtype, header.count, add=add)

    def finds_faults(self) -> bool:
        return True


def _parts(nbytes: int, width: int) -> tuple[int, int, int]:
    """Return the number of words, of chunks, and of the payload's bytes that are not chunks'."""
    words, tail = divmod(nbytes, width)
    chunks = -(-words // _CHUNK)
    return words, chunks, _PREFIX.size + 2 * chunks + tail


def _blocks(queue: Queue, chunks: int) -> int:
    return queue.blocks(chunks, _WARPS, 16)


def _sums(
    queue: Queue,
    payload: DeviceArray,
    words: int,
    width: int,
    others: int,
    expected: int,
    length: DeviceArray | None,
    status: DeviceArray | None,
) -> DeviceArray:
    """Sum the bytes of chunks before each group of them; ``length`` or ``status`` as the kernel says."""
    groups = -(-words // (_CHUNK * _GROUP))
    sums, done = queue.array(max(groups, 1), np.uint64), queue.zeros(4)
    blocks = max(1, queue.blocks(groups, 1, 4))
    queue.launch(
        "mpc",
        "mpc_sums",
        blocks,
        _THREADS,
        payload,
        words,
        width,
        others,
        expected,
        sums,
        done,
        length,
        status,
    )
    return sums
