"""``fp8``, ``mxfp8`` and ``mxfp4`` on a device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, ClassVar

from hybridcomp.arrays import DType
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.together import add_all, alike
from hybridcomp.codecs.minifloat import MX_BLOCK
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES, Header

_PREFIX = struct.Struct("<II")  # block, format
_FORMATS = ("e4m3", "e5m2", "e2m1")  # by their code in a prefix
_THREADS = 256
_WARPS = _THREADS // 32
_CHUNK = 1024  # elements that a warp takes at a time, whole blocks of most sizes
_CHUNKED = (32, 64, 128, 256, 512, 1024)
_WARP_BLOCK = 2048  # elements; more are for all threads of a block
_MOST_THREADS = 1024
_WAVES = 16  # more blocks than fit at once: those that end early make room for others


class _MinifloatDriver(Driver):
    """The driver that the three formats share."""

    module: ClassVar[str]
    mx: ClassVar[bool]

    def modules(self) -> tuple[str, ...]:
        return (self.module,)

    def encode(
        self, codec: Any, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        n = src.size
        block, form = self._layout(codec)
        kernel, threads = f"encode_{form}_{suffix(dtype)}", _THREADS
        if block in _CHUNKED:
            blocks = queue.blocks(-(-n // _CHUNK), _WARPS, _WAVES)
        elif block <= _WARP_BLOCK:
            kernel = f"encode_warp_{form}_{suffix(dtype)}"
            blocks = queue.blocks(-(-n // block), _WARPS, _WAVES)
        else:  # few at a time, so that what they read stays in the cache until they read it again
            kernel, threads = f"encode_whole_{form}_{suffix(dtype)}", _MOST_THREADS
            blocks = queue.blocks(-(-n // block), 1, 2)
        queue.launch(self.module, kernel, max(1, blocks), threads, src, n, block, payload)
        return int(codec.bound(n, dtype)) - HEADER_BYTES

    def head(self, codec: Any) -> bytes:
        block, form = self._layout(codec)
        return _PREFIX.pack(block, _FORMATS.index(form))

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
        block, form = _PREFIX.unpack_from(head)
        kernel = f"decode_{_FORMATS[form]}_{suffix(dtype)}{'_add' if add else ''}"
        blocks = queue.blocks(-(-header.count // _CHUNK), _WARPS, _WAVES)
        queue.launch(self.module, kernel, blocks, _THREADS, payload, header.count, block, out, queue.status)

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
            block, form = _PREFIX.unpack_from(heads[0])
            add_all(queue, self.module, f"sum_{_FORMATS[form]}_{suffix(dtype)}", (block,), payloads, acc)
        else:
            super().decode_sum(headers, heads, payloads, acc, dtype, queue)

    def _layout(self, codec: Any) -> tuple[int, str]:
        return MX_BLOCK if self.mx else codec.block, codec.params.get("format", "e2m1")


class Float8Driver(_MinifloatDriver):
    """The driver of ``fp8``."""

    module = "fp8"
    mx = False


class MXFP8Driver(_MinifloatDriver):
    """The driver of ``mxfp8``."""

    module = "mx"
    mx = True


class MXFP4Driver(_MinifloatDriver):
    """The driver of ``mxfp4``."""

    module = "mx"
    mx = True
