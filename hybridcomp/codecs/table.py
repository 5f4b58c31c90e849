"""The table of codecs: their names and wire ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybridcomp import wire
from hybridcomp.errors import WireError

if TYPE_CHECKING:
    from hybridcomp.codecs.base import Codec

_BY_NAME: dict[str, type[Codec]] = {}
_BY_WIRE_ID: dict[int, type[Codec]] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Add a codec, as a class decorator, under its ``name`` and ``wire_id``.

    Raises:
        ValueError: the name or id is taken, or the id does not fit the header's byte.
    """
    if cls.name in _BY_NAME or cls.wire_id in _BY_WIRE_ID or not 0 <= cls.wire_id <= 255:
        raise ValueError(f"codec name {cls.name!r} or wire id {cls.wire_id} is taken or out of range")
    _BY_NAME[cls.name] = cls
    _BY_WIRE_ID[cls.wire_id] = cls
    return cls


def names() -> list[str]:
    """Return the names of all registered codecs, sorted."""
    return sorted(_BY_NAME)


def by_name() -> Mapping[str, type[Codec]]:
    """Return all registered codecs by their names."""
    return _BY_NAME


def classes() -> list[type[Codec]]:
    """Return all registered codecs."""
    return list(_BY_NAME.values())


def codec_for(header: wire.Header) -> type[Codec]:
    """Find the codec class that decodes a message.

    Raises:
        WireError: no codec has that wire id.
    """
    cls = _BY_WIRE_ID.get(header.codec)
    if cls is None:
        raise WireError(f"unknown codec id {header.codec}")
    return cls
