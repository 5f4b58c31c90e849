"""Codecs whose payload one native function checks and another decodes."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.wire import HEADER_BYTES


class KernelCodec(Codec):
    """Base of such codecs, of floating-point arrays alone. Both functions return a Status."""

    @classmethod
    @abc.abstractmethod
    def check_native(cls, payload: ByteArray, header: wire.Header) -> int:
        """Whether the payload's lengths and fields are right."""

    @classmethod
    @abc.abstractmethod
    def decode_native(
        cls, payload: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType, add: bool
    ) -> int:
        """Check the payload and write its values to ``out`` of ``dtype``, or add them."""

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        checks.floating(header, cls.name)
        checks.status(cls.check_native(msg[HEADER_BYTES:], header), cls.name)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        checks.floating(header, cls.name)
        checks.status(cls.decode_native(msg[HEADER_BYTES:], header, out, dtype, False), cls.name)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        checks.floating(header, cls.name)
        kind = header.dtype.accumulator
        checks.status(cls.decode_native(msg[HEADER_BYTES:], header, acc, kind, True), cls.name)
