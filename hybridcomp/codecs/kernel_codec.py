"""Codecs whose whole messages the kernels write and read: those of the table in :file:`kernels/codecs/messages`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.table import codec_for
from hybridcomp.wire import HEADER_BYTES


def decode_by_id(
    cls: type[Codec], msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType, add: bool
) -> int:
    """Decode a message to ``out`` by the kernels, or ``add`` it; return a Status, 0 if all is well."""
    status: int = native.kernels().decode_payload(
        cls.wire_id, msg[HEADER_BYTES:], header.count, header.dtype, out, dtype, add
    )
    return status


def check_head(header: wire.Header, head: bytes) -> None:
    """Raise WireError for faults in a message's header and its payload's first bytes, as ``check_payload`` does.

    Args:
        header: header of a message of a :class:`KernelCodec`.
        head: the payload's first 32 bytes, or more, or all of them if they are fewer.
    """
    cls = codec_for(header)
    if not cls.lossless:
        checks.floating(header, cls.name)
    kernels = native.kernels()
    status = kernels.check_head(cls.wire_id, head, header.payload, header.count, header.dtype)
    checks.status(status, cls.name)


class KernelCodec(Codec):
    """Base class of codecs whose whole messages the kernels write and read.

    The kernels know how to encode and decode them by their wire ids: arrays of floats, or of any dtype if the codec
    is lossless.
    """

    @functools.cached_property
    def encoder(self) -> Any:
        """Return the kernels' ``Encoder`` for :attr:`params`, made on first use."""
        return native.kernels().encoder(self.wire_id, self.params_hash, **self.params)

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        size: int = self.encoder.encode(src.data, src.dtype, out)
        return size

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        if not cls.lossless:
            checks.floating(header, cls.name)
        payload = msg[HEADER_BYTES:]
        status = native.kernels().check_payload(cls.wire_id, payload, header.count, header.dtype)
        checks.status(status, cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        if not cls.lossless:
            checks.floating(header, cls.name)
        checks.status(decode_by_id(cls, msg, header, out, dtype, False), cls.name)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        checks.floating(header, cls.name)
        checks.status(decode_by_id(cls, msg, header, acc, header.dtype.accumulator, True), cls.name)
