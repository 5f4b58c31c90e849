"""A base for codecs written in NumPy: it keeps the contract of :mod:`.base`, and leaves the payload to the subclass."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

Array = npt.NDArray[Any]


class NumpyCodec(Codec):
    """Codec of floating-point arrays whose payload NumPy packs and unpacks.

    Values come and go in their accumulator's type: float32 for float16, bfloat16 and float32, float64 for float64. A
    subclass gives ``name``, ``wire_id``, ``params``, and the methods below.
    """

    host_only = True

    @abc.abstractmethod
    def payload_bytes(self, n: int, dtype: DType) -> int:
        """Return the bytes of the largest payload of ``n`` elements that come as ``dtype``.

        Where :attr:`fixed_size` is true, every payload of so many elements has as many.
        """

    @abc.abstractmethod
    def pack(self, values: Array) -> ByteArray:
        """Return the payload of the values [n], which are not to be changed, as uint8."""

    @classmethod
    @abc.abstractmethod
    def check(cls, payload: ByteArray, n: int, dtype: DType) -> str | None:
        """Return None if a payload may be that of ``n`` elements of ``dtype``, else what is wrong with it.

        The payload may be anybody's bytes. What this passes :meth:`unpack` takes, without reading outside of it.
        """

    @classmethod
    @abc.abstractmethod
    def unpack(cls, payload: ByteArray, n: int, dtype: DType) -> Array:
        """Return the values [n] of a checked payload, as float32; float64 where ``dtype`` is."""

    # -- the contract ----------------------------------------------------------------------------------

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        return HEADER_BYTES + self.payload_bytes(n, arrays.as_dtype(dtype))

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        payload = self.pack(arrays.widen(src.data, src.dtype))
        out[HEADER_BYTES : HEADER_BYTES + payload.size] = payload
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=payload.size
        )

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        checks.floating(header, cls.name)
        wrong = cls.check(msg[HEADER_BYTES:], header.count, header.dtype)
        if wrong is not None:
            raise WireError(f"malformed {cls.name} payload: {wrong}")

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        native.kernels().convert(cls._values(msg, header), header.dtype.accumulator, out, dtype, False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        kind = header.dtype.accumulator
        native.kernels().convert(cls._values(msg, header), kind, acc, kind, True)

    @classmethod
    def _values(cls, msg: ByteArray, header: wire.Header) -> Array:
        cls.check_payload(msg, header)
        values = cls.unpack(msg[HEADER_BYTES:], header.count, header.dtype)
        return np.ascontiguousarray(values, header.dtype.accumulator.storage)
