"""``sign`` on a device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.together import add_all, alike
from hybridcomp.codecs.quantize import MAX_BLOCK
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.errors import WireError
from hybridcomp.wire import Header

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
        return payload_bytes(src.size, dtype, codec.block)

    def head(self, codec: Any) -> bytes:
        return _PREFIX.pack(codec.block, 0)

    def check(self, header: Header, head: bytes) -> None:
        checks.floating(header, "sign")
        checks.payload_bytes(header, payload_bytes(header.count, header.dtype, _block(head)), "sign")

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
        queue.launch("sign", kernel, blocks, _THREADS, payload, header.count, _block(head), out, queue.status)

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
            add_all(queue, "sign", f"sign_sum_{suffix(dtype)}", _block(heads[0]), payloads, acc)
        else:
            super().decode_sum(headers, heads, payloads, acc, dtype, queue)


def payload_bytes(n: int, dtype: DType, block: int) -> int:
    """Return the number of bytes of a payload of ``n`` elements."""
    return _PREFIX.size + -(-n // block) * dtype.accumulator.itemsize + (n + 7) // 8


def _block(head: bytes) -> int:
    """Return the block of a payload's prefix; raise WireError if there is none that the CPU takes."""
    if len(head) < _PREFIX.size:
        raise WireError(f"malformed sign payload: {len(head)} bytes")
    block, zero = _PREFIX.unpack_from(head)
    if zero or not 8 <= block <= MAX_BLOCK or block % 8:
        raise WireError(f"malformed sign payload: block {block}, reserved bits {zero:#x}")
    return int(block)
