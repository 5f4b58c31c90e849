"""``exponent`` on a device."""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import DType
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.exponent import BLOCK
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

_THREADS = 128
_WARPS = _THREADS // 32  # blocks of elements that a block of threads has at a time
_SCAN_THREADS, _MOVE_THREADS = 1024, 256


class ExponentDriver(Driver):
    """The driver of ``exponent``.

    Blocks are coded where they would be if none became smaller, and moved together afterwards: lengths become places,
    and places are filled, by kernels of ``bounded``.
    """

    def modules(self) -> tuple[str, ...]:
        return ("exponent", "bounded", "convert")

    def finds_faults(self) -> bool:
        return True

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        n = src.size
        if not dtype.is_float:
            convert(queue, src, dtype, payload, dtype, n)
            return src.nbytes
        blocks, stride = -(-n // BLOCK), BLOCK * dtype.itemsize
        scratch, sums = queue.empty(blocks * stride), queue.array(blocks, np.uint32)
        grid = queue.blocks(blocks, _WARPS, 16)
        name = f"exponent_encode_{suffix(dtype)}"
        queue.launch("exponent", name, grid, _THREADS, src, n, payload, scratch, sums)
        starts, total = queue.array(blocks, np.uint64), queue.array(1, np.uint64)
        queue.launch(
            "bounded", "bounded_starts", 1, _SCAN_THREADS, sums, blocks, blocks, starts, 0, total, None
        )
        grid = queue.blocks(blocks, _MOVE_THREADS // 32)
        queue.launch(
            "bounded", "bounded_move", grid, _MOVE_THREADS, scratch, stride, blocks, sums, starts, payload
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
        n, kind, status = header.count, header.dtype, queue.status
        if not kind.is_float:
            convert(queue, payload, kind, out, dtype, n, add=add)
            return
        blocks = -(-n // BLOCK)
        sums, starts = queue.array(blocks, np.uint32), queue.array(blocks, np.uint64)
        grid = queue.blocks(blocks, _THREADS)
        queue.launch("exponent", "exponent_sums", grid, _THREADS, payload, n, int(kind), sums, status)
        queue.launch(
            "bounded",
            "bounded_starts",
            1,
            _SCAN_THREADS,
            sums,
            blocks,
            blocks,
            starts,
            payload.size,
            None,
            status,
        )
        add_here = add and dtype is kind.accumulator
        target = out if add_here or (dtype is kind and not add) else queue.array(n, kind.storage)
        name = f"exponent_{'add' if add_here else 'decode'}_{suffix(kind)}"
        grid = queue.blocks(blocks, _WARPS, 16)
        queue.launch("exponent", name, grid, _THREADS, payload, starts, n, target, status)
        if target is not out:
            convert(queue, target, kind, out, dtype, n, add=add)
