"""``zfp`` and ``bounded`` on a device."""

from __future__ import annotations

import struct

import numpy as np

from hybridcomp.arrays import DType
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.bounded import BoundedCodec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.zfp import ZfpCodec
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.errors import CudaUnavailableError
from hybridcomp.wire import HEADER_BYTES, Header

_THREADS = 256
_CODER = slice(12, 16)  # the coder in a payload of ``bounded``; zeros: planes
_NO_KERNELS = (
    "'bounded' has kernels for coder=planes alone: encode and decode other coders' messages in host memory"
)


class ZfpDriver(Driver):
    """The driver of ``zfp``: a thread for each block of four values."""

    words = (32, 64)  # bits of a block that have kernels of their own
    # A grid several times as large as what is resident: its last round is then short. Each block fills a table first.
    waves = 16

    def modules(self) -> tuple[str, ...]:
        return ("zfp",)

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        assert isinstance(codec, ZfpCodec)
        bits = int(4 * codec.rate)
        own = f"_{bits}" if bits in self.words else ""
        queue.launch(
            "zfp",
            f"zfp_encode_{suffix(dtype)}{own}",
            max(1, queue.blocks(-(-src.size // 4), _THREADS, self.waves)),
            _THREADS,
            src,
            payload,
            src.size,
            bits,
            shared=0 if own else _THREADS // 32 * bits * 8,
        )
        return codec.bound(src.size, dtype) - HEADER_BYTES

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
        (bits,) = struct.unpack_from("<I", head)
        own = f"_{bits}" if bits in self.words else ""
        queue.launch(
            "zfp",
            f"zfp_decode_{suffix(header.dtype.accumulator)}_{suffix(dtype)}{'_add' if add else ''}{own}",
            queue.blocks(-(-header.count // 4), _THREADS, self.waves),
            _THREADS,
            payload,
            out,
            header.count,
            bits,
            queue.status,
        )


class BoundedDriver(Driver):
    """The driver of ``bounded``: a thread block for each chunk of blocks of 64 elements."""

    prefix = 16
    block = 64
    chunk = 2048  # kChunk of bounded.cuh
    waves = 64  # no number of resident blocks leaves much of the last round idle

    def modules(self) -> tuple[str, ...]:
        return ("bounded",)

    def finds_faults(self) -> bool:
        return True

    def on_host(self, head: bytes) -> bool:
        return any(head[_CODER])

    def check(self, header: Header, head: bytes) -> None:
        super().check(header, head)
        if self.on_host(head):
            raise CudaUnavailableError(_NO_KERNELS)

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        assert isinstance(codec, BoundedCodec)
        if not codec.on_device:
            raise CudaUnavailableError(_NO_KERNELS)
        n, name = src.size, suffix(dtype)
        chunks = -(-n // self.chunk)
        lows = highs = None
        ranges = 0
        error = codec.abs or 0.0
        if codec.rel is not None:
            ranges = queue.blocks(n, _THREADS * 16)
            lows, highs = queue.array(ranges, np.int64), queue.array(ranges, np.int64)
            queue.launch("bounded", f"bounded_range_{name}", ranges, _THREADS, src, n, lows, highs)
            error = codec.rel if ranges else 0.0  # no values have no range
        (bits,) = struct.unpack("<Q", struct.pack("<d", error))
        queue.launch("bounded", "bounded_prefix", 1, _THREADS, payload, bits, int(dtype), lows, highs, ranges)
        stride = self.chunk * dtype.itemsize
        scratch = queue.empty(chunks * stride)
        sums = queue.array(chunks, np.uint32)
        queue.launch(
            "bounded",
            f"bounded_encode_{name}",
            queue.blocks(n, self.chunk, self.waves),
            _THREADS,
            src,
            n,
            payload,
            scratch,
            sums,
        )
        blocks = -(-n // self.block)
        starts, total = queue.array(chunks, np.uint64), queue.array(1, np.uint64)
        first = self.prefix + blocks
        queue.launch("bounded", "bounded_starts", 1, 1024, sums, chunks, first, starts, 0, total, None)
        grid = queue.blocks(chunks, _THREADS // 32)
        queue.launch(
            "bounded", "bounded_move", grid, _THREADS, scratch, stride, chunks, sums, starts, payload
        )
        return total

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
        n, status = header.count, queue.status
        chunks, first = -(-n // self.chunk), self.prefix + -(-n // self.block)
        sums, starts = queue.array(chunks, np.uint32), queue.array(chunks, np.uint64)
        grid = queue.blocks(chunks, _THREADS // 32)
        size = header.dtype.itemsize
        queue.launch("bounded", "bounded_sums", grid, _THREADS, payload, n, size, sums, status)
        queue.launch(
            "bounded", "bounded_starts", 1, 1024, sums, chunks, first, starts, payload.size, None, status
        )
        queue.launch(
            "bounded",
            f"bounded_decode_{suffix(header.dtype)}_{suffix(dtype)}{'_add' if add else ''}",
            queue.blocks(n, self.chunk, self.waves),
            _THREADS,
            payload,
            payload.size,
            starts,
            n,
            out,
            status,
        )
