"""``sign`` on a device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from hybridcomp.arrays import DType
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.together import add_all, alike
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES, Header

_PREFIX = struct.Struct("<II")  # block, zero
_THREADS = 256
_CHUNK = 1024  # elements that a warp decodes at a time
_WAVES = 16  # more blocks than fit at once: those that end early make room for others


class SignDriver(Driver):
    """The driver of ``sign``: half a warp encodes a block; a warp decodes chunks of 1024 elements."""

    def modules(self) -> tuple[str, ...]:
        return ("sign",)

    def encode(
        self, codec: Any, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        blocks = max(1, queue.blocks(-(-src.size // codec.block), _THREADS // 16, _WAVES))
        kernel = f"sign_encode_{suffix(dtype)}"
        queue.launch("sign", kernel, blocks, _THREADS, src, src.size, codec.block, payload)
        return int(codec.bound(src.size, dtype)) - HEADER_BYTES

    def head(self, codec: Any) -> bytes:
        return _PREFIX.pack(codec.block, 0)

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
        computed = suffix(header.dtype.accumulator)
        kernel = f"sign_decode_{computed}_{suffix(dtype)}{'_add' if add else ''}"
        blocks = queue.blocks(header.count, _CHUNK * _THREADS // 32, _WAVES)
        block, _ = _PREFIX.unpack_from(head)
        queue.launch("sign", kernel, blocks, _THREADS, payload, header.count, block, out, queue.status)

    def decode_sum(
        self,
        headers: Sequence[Header],
        heads: Sequence[bytes],
        payloads: Sequence[DeviceArray],
        acc: DeviceArray,
        dtype: DType,
        queue: Queue,
    ) -> None:
        if alike(headers, heads, dtype):
            block, _ = _PREFIX.unpack_from(heads[0])
            add_all(queue, "sign", f"sign_sum_{suffix(dtype)}", (block,), payloads, acc)
        else:
            super().decode_sum(headers, heads, payloads, acc, dtype, queue)
