"""``zfp`` and ``bounded`` on a device."""

from __future__ import annotations

import struct


from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.zfp import ZfpCodec
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES, Header

_THREADS = 256
_BAD_LENGTH, _BAD_ZFP_BITS = 1, 24  # of hybridcomp/status.hpp


class ZfpDriver(Driver):
    """``zfp``: a thread for each block of four values."""

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

    def check(self, header: Header, head: bytes) -> None:
        checks.floating(header, "zfp")
        if len(head) < 8:
            checks.status(_BAD_LENGTH, "zfp")
        bits, reserved = struct.unpack_from("<II", head)
        if reserved or not 11 <= bits <= 256:
            checks.status(_BAD_ZFP_BITS, "zfp")
        codec = ZfpCodec(bits / 4)
        if codec.can_carry(header.dtype, (header.count,)) is not None:
            checks.status(_BAD_ZFP_BITS, "zfp")
        checks.payload_bytes(header, codec.bound(header.count, header.dtype) - HEADER_BYTES, "zfp")

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
