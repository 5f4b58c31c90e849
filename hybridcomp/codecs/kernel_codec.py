"""Codecs of floating-point arrays whose whole messages the kernels write and read."""

from __future__ import annotations

import abc
import functools
from typing import Any

import numpy as np

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.wire import HEADER_BYTES


def decode_floats(
    cls: type[Codec], msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType, add: bool
) -> int:
    """Decode a message of floats to ``out`` by the kernels, or ``add`` it; return a Status, 0 if all is well."""
    status: int = native.kernels().decode_payload(
        cls.wire_id, msg[HEADER_BYTES:], header.count, header.dtype, out, dtype, add
    )
    return status


class KernelCodec(Codec):
    """Base class of codecs whose whole messages the kernels write and read.

    The kernels know how to decode them by their wire ids.
    """

    @abc.abstractmethod
    def make_encoder(self) -> Any:
        """Make the kernels' ``Encoder`` for this codec's parameters."""

    @functools.cached_property
    def encoder(self) -> Any:
        """Return the encoder of :meth:`make_encoder`, made on first use."""
        return self.make_encoder()

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        size: int = self.encoder.encode(src.data, src.dtype, out)
        return size

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        checks.floating(header, cls.name)
        payload = msg[HEADER_BYTES:]
        status = native.kernels().check_payload(cls.wire_id, payload, header.count, header.dtype)
        checks.status(status, cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        cls._decode(msg, header, out, dtype, False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        cls._decode(msg, header, acc, header.dtype.accumulator, True)

    @classmethod
    def _decode(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType, add: bool
    ) -> None:
        checks.floating(header, cls.name)
        checks.status(decode_floats(cls, msg, header, out, dtype, add), cls.name)
