"""Pack messages to bytes that travel together, and take them apart again.

Before the messages for a rank comes their table: an entry that counts them, and one for each, of its tag and its
length; entries are two numbers of 8 bytes, little-endian. The messages follow in that order, each padded to a multiple
of 16. Who reads the table knows where all of them are, so they may stay in a device's memory. In the place of the
count, the tag :data:`FAILED` marks a text: the error for which a rank has nothing else to send. No messages take no
bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from hybridcomp.arrays import ByteArray
from hybridcomp.errors import WireError

_ENTRY = struct.Struct("<qq")
ENTRY_BYTES = _ENTRY.size
_ALIGN = 16
_COUNT = 0  # in a tag's place, in the first entry
FAILED = -1


class Extent(NamedTuple):
    """Bytes of a message within those of all: its tag, its first byte, and the byte after its last one."""

    tag: int
    begin: int
    end: int


def packed_size(lengths: Sequence[int], more: int = 0) -> int:
    """Return the bytes that messages of these lengths take, and one ``more`` if it has any."""
    messages = len(lengths) + (more > 0)
    if not messages:
        return 0
    return table_size(messages) + padded(more) + sum(map(padded, lengths))


def table_size(messages: int) -> int:
    """Return the bytes of the table of so many messages."""
    return ENTRY_BYTES * (1 + messages)


def padded(nbytes: int) -> int:
    """Return the bytes that a message takes behind the table."""
    return -(-nbytes // _ALIGN) * _ALIGN


def table_of(messages: Sequence[tuple[int, int]]) -> tuple[bytes, list[Extent]]:
    """Return the table of messages, and where each of them goes.

    Args:
        messages: tag above 0, and length, of each.
    """
    table = b"".join([_ENTRY.pack(_COUNT, len(messages)), *[_ENTRY.pack(*entry) for entry in messages]])
    at, extents = len(table), []
    for tag, nbytes in messages:
        extents.append(Extent(tag, at, at + nbytes))
        at += padded(nbytes)
    return table, extents


def pack_failure(text: str, out: ByteArray) -> None:
    """Fill a buffer that other ranks wait for with as much of an error's text as fits."""
    out[:] = 0
    room = out.size - ENTRY_BYTES
    if room < 0:
        return
    said = text.encode()[:room]
    _ENTRY.pack_into(out.data, 0, FAILED, len(said))
    out[ENTRY_BYTES : ENTRY_BYTES + len(said)] = memoryview(said)


def unpack(head: ByteArray, nbytes: int) -> list[Extent]:
    """Return where messages are that have come, or one extent of the tag :data:`FAILED`, of the error's text.

    Args:
        head: their first bytes, with all of the table.
        nbytes: number of all of their bytes.

    Raises:
        WireError: the bytes are no packed messages.
    """
    if not nbytes:
        return []
    if min(head.size, nbytes) < ENTRY_BYTES:
        raise WireError(f"{nbytes} bytes where packed messages begin, whose first entry has {ENTRY_BYTES}")
    tag, count = _ENTRY.unpack_from(head.data, 0)
    if tag == FAILED and 0 <= count <= nbytes - ENTRY_BYTES:
        return [Extent(FAILED, ENTRY_BYTES, ENTRY_BYTES + count)]
    if tag != _COUNT or not 0 < count <= min(head.size, nbytes) // ENTRY_BYTES - 1:
        raise WireError(f"a table of tag {tag} and {count} messages in {min(head.size, nbytes)} bytes")
    extents, at = [], table_size(count)
    for tag, length in _ENTRY.iter_unpack(head.data[ENTRY_BYTES:at]):
        if tag < 1 or not 0 <= length <= nbytes - at or padded(length) > nbytes - at:
            raise WireError(f"a packed message of tag {tag} and {length} bytes where {nbytes - at} follow")
        extents.append(Extent(tag, at, at + length))
        at += padded(length)
    if at != nbytes:
        raise WireError(f"{nbytes - at} bytes behind the last packed message")
    return extents
