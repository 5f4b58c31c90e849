"""Define the header that every message begins with: 32 bytes, little-endian, then the payload.

===== ======= ==========================================================
bytes  field   meaning
===== ======= ==========================================================
0-3   magic   ``HYC\\x01`` (the last byte is the format's version)
4     codec   wire id of the codec
5     dtype   :class:`~hybridcomp.arrays.DType` of the encoded array
6-7   flags   reserved, zero
8-15  count   elements
16-23 payload bytes that follow the header
24-27 params  CRC-32C of the codec's spec string
28-31 crc     CRC-32C of bytes 0 to 27 and of the payload
===== ======= ==========================================================

``kernels/include/hybridcomp/wire.hpp`` holds the same layout for C++ and CUDA.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridcomp import arrays, native
from hybridcomp.arrays import ByteArray, DType
from hybridcomp.errors import WireError

MAGIC = 0x01435948  # b"HYC\x01"
HEADER_BYTES = 32
_HEADER = struct.Struct("<IBBHQQII")
_CRC = struct.Struct("<I")
_CRC_AT = 28
_DTYPES = {int(d): d for d in DType}
_UINT8 = np.dtype(np.uint8)
MAX_COUNT = 1 << 48  # more elements than any address space holds; keeps size arithmetic far from overflow


@dataclass(slots=True)
class Header:
    """Checked header. ``count`` is in elements, ``payload`` in bytes."""

    codec: int
    dtype: DType
    count: int
    payload: int
    params: int


@functools.lru_cache(maxsize=1024)
def params_hash(spec: str) -> int:
    """Return the CRC-32C of a spec string."""
    return int(native.kernels().crc32c(spec.encode()))


def peek(msg: ByteArray, size: int | None = None) -> Header:
    """Read and check a header without looking at the payload's bytes.

    Args:
        msg: the message, or its beginning.
        size: bytes of the message's buffer, if ``msg`` is not all of it.

    Raises:
        WireError: the message is too short, has a wrong magic or version, an unknown dtype, reserved bits set, or a
            length that does not fit the buffer.
    """
    size = msg.size if size is None else size
    if size < HEADER_BYTES:
        raise WireError(f"message of {size} bytes is shorter than a header ({HEADER_BYTES})")
    magic, codec, dtype, flags, count, payload, params, _ = _HEADER.unpack_from(msg.data, 0)
    if magic != MAGIC:
        raise WireError(f"not a hybridcomp message of version 1: it begins with {bytes(msg[:4])!r}")
    if flags:
        raise WireError(f"reserved flag bits are set: {flags:#06x}")
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise WireError(f"unknown dtype code {dtype}")
    if count > MAX_COUNT:
        raise WireError(f"element count {count} is over the limit of {MAX_COUNT}")
    if payload > size - HEADER_BYTES:
        raise WireError(f"payload of {payload} bytes in a message of {size}")
    return Header(codec, kind, count, payload, params)


def open_message(msg: Any) -> tuple[ByteArray, Header]:
    """Check a message's header and CRC; return its bytes (header and payload, nothing after) and header.

    Raises:
        WireError: as :func:`peek`, or the CRC does not match.
    """
    raw = _as_bytes(msg)
    fields = native.kernels().open_message(raw)
    if fields is None:
        raise _fault(raw)
    codec, kind, count, payload, params = fields
    if raw.size != HEADER_BYTES + payload:
        raw = raw[: HEADER_BYTES + payload]
    return raw, Header(codec, _DTYPES[kind], count, payload, params)


def first_fault(
    messages: Sequence[ByteArray],
    codec: int,
    params: int,
    dtype: DType,
    counts: Sequence[int],
    *,
    crc: bool = True,
) -> int | None:
    """Find the first wrong one of many messages; :func:`open_message` then says what is wrong with it.

    Args:
        messages: 1-D uint8 arrays that begin with a message.
        codec, params, dtype: values that every header must have.
        counts: each message's elements.
        crc: whether their checksums are checked: not where no wire that could damage them has carried them.

    Returns:
        The index of the first message that is not whole, or not as expected. None if all are.
    """
    found: int | None = native.kernels().open_messages(
        list(messages), codec, params, dtype, list(counts), crc
    )
    return found


def _fault(raw: ByteArray) -> WireError:
    """Describe what is wrong with a message that the kernels refused."""
    try:
        header = peek(raw)
    except WireError as error:
        return error
    crc = native.kernels().message_crc(raw[: HEADER_BYTES + header.payload])
    (stored,) = _CRC.unpack_from(raw.data, _CRC_AT)
    return WireError(f"damaged message: CRC-32C is {crc:#010x}, the header says {stored:#010x}")


def seal(out: ByteArray, codec: int, params: int, *, dtype: DType, count: int, payload: int) -> int:
    """Write the header before a payload already in ``out[32:32 + payload]``; return the message's length."""
    _HEADER.pack_into(out.data, 0, MAGIC, codec, dtype, 0, count, payload, params, 0)
    crc = native.kernels().message_crc(out[: HEADER_BYTES + payload])
    _CRC.pack_into(out.data, _CRC_AT, crc)
    return HEADER_BYTES + payload


def _as_bytes(msg: Any) -> ByteArray:
    if type(msg) is np.ndarray and msg.dtype is _UINT8 and msg.ndim == 1 and msg.flags.c_contiguous:
        return msg  # the usual case, without the cost of asking its type
    if isinstance(msg, bytes | bytearray | memoryview):
        return np.frombuffer(msg, np.uint8)
    flat = arrays.flatten(msg)
    if flat.dtype is not DType.UINT8:
        raise WireError(f"a message is uint8, not {flat.dtype.label}")
    data: ByteArray = flat.data
    return data
