"""Build the sparse codecs: they send some elements, the rest decode to zero.

Payload: uint64 k, uint64 bytes of the index section, the index section, then the k values, ascending by
index, as a message of their own (the ``values`` codec's). The index section is a uint32 count per block of
65,536 elements, then per block the indices within it: uint16 each, or a bitmap where that is smaller.

Values as they are (``none``) are written and read in one go with the rest, and their own CRC is written but not
looked at: that of the whole message covers them.
"""

from __future__ import annotations

import abc
import functools
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.kernel_codec import decode_by_id
from hybridcomp.codecs.none import NoneCodec
from hybridcomp.codecs.registry import get_codec
from hybridcomp.codecs.table import classes, codec_for
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES

PREFIX = struct.Struct("<QQ")
INDEX_BLOCK = 65536


def open_prefix(header: wire.Header, head: bytes | memoryview) -> tuple[int, int]:
    """Return the number of values and the bytes of the index section that a payload begins with.

    Raises:
        WireError: the payload cannot hold so many.
    """
    name = codec_for(header).name
    checks.floating(header, name)
    malformed = f"malformed {name} payload: "
    if header.payload < PREFIX.size:
        raise WireError(f"{malformed}{header.payload} bytes are too few")
    k, index_bytes = PREFIX.unpack_from(head)
    counts = 4 * -(-header.count // INDEX_BLOCK)
    if index_bytes > header.payload - PREFIX.size or index_bytes < counts:
        raise WireError(f"{malformed}{index_bytes} bytes of indices for {header.count} elements")
    if k > min(header.count, 8 * (index_bytes - counts)):  # an index takes a bit at least
        raise WireError(f"{malformed}{k} of {header.count} elements in {index_bytes} bytes of indices")
    return k, index_bytes


def check_values(header: wire.Header, head: bytes | memoryview, inner: wire.Header) -> type[Codec]:
    """Return the codec of the message inside, whose payload is yet to be checked; the prefix must have been checked.

    Raises:
        WireError: the inner header does not fit the values that the prefix announces.
    """
    k, index_bytes = PREFIX.unpack_from(head)
    codec, name = codec_for(inner), codec_for(header).name
    if not codec.carries_values or inner.count != k or inner.dtype is not header.dtype:
        raise WireError(
            f"malformed {name} payload: {inner.count} {inner.dtype.label} values by codec {codec.name!r} "
            f"for {k} {header.dtype.label} elements"
        )
    if HEADER_BYTES + inner.payload != header.payload - PREFIX.size - index_bytes:
        raise WireError(f"malformed {name} payload: bytes after the values")
    return codec


class SparseCodec(Codec):
    """Base class of the sparse codecs. A subclass says which elements are sent and how many they may be."""

    fixed_size = False
    partial = True

    def __init__(self, values: str | Codec) -> None:
        self._values = get_codec(values)
        if not self._values.carries_values:
            allowed = ", ".join(sorted(cls.name for cls in classes() if cls.carries_values))
            raise ValueError(f"values must be one of {allowed}, not {self._values.name!r}")

    @property
    def values(self) -> Codec:
        """Return the codec of the sent values."""
        return self._values

    @abc.abstractmethod
    def most(self, n: int) -> int:
        """Return the most elements of ``n`` that are sent."""

    @property
    @abc.abstractmethod
    def selection(self) -> dict[str, Any] | None:
        """Return the arguments by which the kernels' ``Encoder`` selects the elements, or None if it cannot."""

    @functools.cached_property
    def encoder(self) -> Any:
        by = self.selection
        if type(self._values) is not NoneCodec or by is None:
            return None
        return native.kernels().encoder(self.wire_id, self.params_hash, plain=self._values.params_hash, **by)

    @abc.abstractmethod
    def select(self, src: Flat) -> Any:
        """Select the elements to send, as the kernels' ``Selected``."""

    @checks.once_a_step
    def at_step(self, step: int) -> Codec:
        values = self._values.at_step(step)
        return self if values is self._values else type(self)(**{**self.params, "values": values})

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        k = self.most(n)
        indices = int(native.kernels().sparse_index_bound(n, k))
        return HEADER_BYTES + PREFIX.size + indices + self._values.bound(k, dtype)

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        if self.encoder is not None:
            size: int = self.encoder.encode(src.data, src.dtype, out)
            return size
        selected = self.select(src)
        start = HEADER_BYTES + PREFIX.size
        index_bytes: int = selected.write_indices(out[start:])
        PREFIX.pack_into(out.data, HEADER_BYTES, selected.count, index_bytes)
        values = selected.values.view(src.dtype.storage)
        end = start + index_bytes
        end += self._values.encode_flat(Flat(values, src.dtype, values.shape, True, False), out[end:])
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=end - HEADER_BYTES
        )

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        cls._open(msg, header)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        cls._scatter(msg, header, out, dtype, add=False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        cls._scatter(msg, header, acc, header.dtype.accumulator, add=True)

    @classmethod
    def decode_sum_flat(
        cls, messages: Sequence[tuple[ByteArray, wire.Header]], out: np.ndarray[Any, Any]
    ) -> None:
        kind = arrays.as_dtype(out.dtype)
        if all(header.dtype is kind and header.count == out.size for _, header in messages):
            payloads = [raw[HEADER_BYTES:] for raw, _ in messages]
            if native.kernels().sparse_sum(payloads, out.size, kind, out) == 0:
                return
        # Some values are not plain, or a message is malformed: decode one by one.
        super().decode_sum_flat(messages, out)

    @classmethod
    def _open(cls, msg: ByteArray, header: wire.Header) -> tuple[ByteArray, ByteArray, wire.Header]:
        """Check and split a message: its index section, the values' message and that one's header."""
        _, index_bytes = open_prefix(header, msg[HEADER_BYTES:].data)
        start = HEADER_BYTES + PREFIX.size
        values, inner = wire.open_message(msg[start + index_bytes :])
        check_values(header, msg[HEADER_BYTES:].data, inner).check_payload(values, inner)
        return msg[start : start + index_bytes], values, inner

    @classmethod
    def _scatter(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType, *, add: bool
    ) -> None:
        checks.floating(header, cls.name)
        if not decode_by_id(cls, msg, header, out, dtype, add):
            return
        # The values are not plain, or the message is malformed: check and decode its parts.
        indices, message, inner = cls._open(msg, header)
        if inner.codec == NoneCodec.wire_id and inner.dtype is dtype:
            values = message[HEADER_BYTES:]  # as they are
        else:
            values = np.empty(inner.count, dtype.storage)
            codec_for(inner).decode_flat(message, inner, values, dtype)
        code = native.kernels().sparse_scatter(indices, header.count, inner.count, values, out, dtype, add)
        checks.status(code, cls.name)


class RatioCodec(SparseCodec):
    """A sparse codec that aims at a share of the elements.

    Args:
        ratio: share of the elements; above 0, at most 1.
        values: codec of the sent values.
    """

    def __init__(self, ratio: float, values: str | Codec) -> None:
        super().__init__(values)
        self._ratio = checks.number("ratio", ratio, most=1)
        # In whole numbers of the ratio as written: 0.07 * 100 is 7.000000000000001 in floating point.
        self._share = Fraction(str(self._ratio)).as_integer_ratio()

    @property
    def ratio_kept(self) -> float:
        """Return the share of the elements that is sent."""
        return self._ratio

    @property
    def selection(self) -> dict[str, Any] | None:
        numerator, denominator = self._share
        if denominator >= 1 << 63:  # for a ratio such as 1e-40
            return None
        return {"numerator": numerator, "denominator": denominator}

    def k(self, n: int) -> int:
        """Return the share of ``n`` elements, rounded up."""
        numerator, denominator = self._share
        return -(-n * numerator // denominator)
