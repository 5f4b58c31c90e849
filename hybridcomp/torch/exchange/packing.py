"""Pack messages to bytes that travel together, and take them apart again.

A message is packed as its tag and its length, 8 bytes each, little-endian, and its bytes, padded to a multiple of 16.
The tag :data:`FAILED` marks a text: the error for which a rank has nothing else to send. Padding follows it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from hybridcomp.arrays import ByteArray
from hybridcomp.errors import WireError

_ENTRY = struct.Struct("<qq")
_ALIGN = 16
FAILED = -1


def packed_size(nbytes: int) -> int:
    """Return the bytes that a message of ``nbytes`` takes."""
    return _ENTRY.size + -(-nbytes // _ALIGN) * _ALIGN


def pack(messages: Sequence[tuple[int, ByteArray]], out: ByteArray) -> None:
    """Write messages, each with its tag, one after another.

    Args:
        messages: messages with tags above 0.
        out: buffer of as many bytes as :func:`packed_size` says of all.
    """
    at = 0
    for tag, data in messages:
        _ENTRY.pack_into(out.data, at, tag, data.size)
        begin, end = at + _ENTRY.size, at + packed_size(data.size)
        out[begin : begin + data.size] = data
        out[begin + data.size : end] = 0
        at = end


def pack_failure(text: str, out: ByteArray) -> None:
    """Fill a buffer that other ranks wait for with as much of an error's text as fits."""
    out[:] = 0
    room = out.size - _ENTRY.size
    if room < 0:
        return
    said = text.encode()[:room]
    _ENTRY.pack_into(out.data, 0, FAILED, len(said))
    out[_ENTRY.size : _ENTRY.size + len(said)] = memoryview(said)


def unpack(data: ByteArray) -> Iterator[tuple[int, ByteArray]]:
    """Yield tags and messages, which are views of the data.

    Raises:
        WireError: the bytes are no packed messages.
    """
    at = 0
    while at < data.size:
        if data.size - at < _ENTRY.size:
            raise WireError(f"{data.size - at} bytes where a packed message begins, which has {_ENTRY.size}")
        tag, nbytes = _ENTRY.unpack_from(data.data, at)
        begin = at + _ENTRY.size
        if tag == FAILED and 0 <= nbytes <= data.size - begin:
            yield tag, data[begin : begin + nbytes]
            return
        if tag < 1 or not 0 <= nbytes <= data.size - begin or packed_size(nbytes) > data.size - at:
            raise WireError(
                f"a packed message of tag {tag} and {nbytes} bytes where {data.size - begin} follow"
            )
        yield tag, data[begin : begin + nbytes]
        at += packed_size(nbytes)
