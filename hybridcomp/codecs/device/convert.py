"""``none``, ``fp16``, ``bf16`` on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hybridcomp.arrays import DType
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.device.together import add_all, alike
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header


class _CastDriver(Driver):
    """The driver of elements stored as ``target``, or as they are."""

    target: ClassVar[DType | None] = None

    def modules(self) -> tuple[str, ...]:
        return ("convert",)

    def _stored(self, dtype: DType) -> DType:
        return self.target or dtype

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        kind = self._stored(dtype)
        convert(queue, src, dtype, payload, kind, src.size)
        return src.size * kind.itemsize

    def head(self, codec: Codec) -> bytes:
        return b""

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
        convert(queue, payload, self._stored(header.dtype), out, dtype, header.count, add=add)

    def decode_sum(
        self,
        headers: Sequence[Header],
        heads: Sequence[bytes],
        payloads: Sequence[DeviceArray],
        acc: DeviceArray,
        dtype: DType,
        queue: Queue,
    ) -> None:
        kinds = {self._stored(header.dtype) for header in headers}
        if len(headers) > 1 and len(kinds) == 1 and alike(headers, [b""], dtype):  # payloads have no prefix
            kernel = f"sum_{suffix(kinds.pop())}_{suffix(dtype)}"
            add_all(queue, "convert", kernel, (), payloads, acc)
        else:
            super().decode_sum(headers, heads, payloads, acc, dtype, queue)


class NoneDriver(_CastDriver):
    """The driver of ``none``: any dtype."""


class Float16Driver(_CastDriver):
    """The driver of ``fp16``."""

    target = DType.FLOAT16


class BFloat16Driver(_CastDriver):
    """The driver of ``bf16``."""

    target = DType.BFLOAT16
