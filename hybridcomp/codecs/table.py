"""The table of codecs: their names and wire ids, of this package and of others.

Wire ids below 128 are this package's. Ids from 128 to 239 are for codecs of other packages, which ask for one to be
noted in :data:`CLAIMED`, so that no two have the same; ids from 240 on are for codecs that stay within one company.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar

from hybridcomp import wire
from hybridcomp.entry_points import EntryPoints, Offer, check_name, is_name
from hybridcomp.errors import ConfigError, WireError, printable

OUTSIDE = range(128, 256)
#: Wire ids that packages have asked for: the package on its index, and the codec's name.
CLAIMED: Mapping[int, tuple[str, str]] = {
    128: ("hybridcomp-example", "example.ternary"),
}
ENTRY_POINTS = EntryPoints("hybridcomp.codecs")

Class = type[Any]
"""A subclass of :class:`~hybridcomp.codecs.base.Codec`, of which the table reads name and wire id."""

_Class = TypeVar("_Class", bound=Class)
_BY_NAME: dict[str, Class] = {}
_BY_WIRE_ID: dict[int, Class] = {}
_BASE = "hybridcomp.codecs.base.Codec"  # which imports this module
_lock = threading.Lock()  # never held while a package is imported, which may register codecs in other threads


def register(cls: _Class) -> _Class:
    """Add a codec of this package, as a class decorator, under its ``name`` and ``wire_id``.

    Raises:
        ValueError: the name or id is taken, or the id is not below 128.
    """
    if cls.name in _BY_NAME or cls.wire_id in _BY_WIRE_ID or not 0 <= cls.wire_id < OUTSIDE.start:
        raise ValueError(f"codec name {cls.name!r} or wire id {cls.wire_id} is taken or out of range")
    _BY_NAME[cls.name] = _BY_WIRE_ID[cls.wire_id] = cls
    return cls


def register_codec(cls: _Class) -> _Class:
    """Add a codec of another package, also as a class decorator, under its ``name`` and ``wire_id``.

    The same class may be added again, and one that was defined anew, as by a cell of a notebook that runs again, takes
    the earlier one's place. Every rank must register the same codecs.

    Args:
        cls: class that derives from :class:`~hybridcomp.codecs.base.Codec`, with all its abstract methods.

    Raises:
        TypeError: it does not.
        ValueError: the name is none of a codec, the wire id is not from 128 to 255, or one of them is taken; names both
            packages.
    """
    if not isinstance(cls, type) or not any(_full_name(base) == _BASE for base in cls.__mro__):
        raise TypeError(f"a codec is a class that derives from {_BASE}, not {printable(str(cls)[:64])}")
    abstract = sorted(getattr(cls, "__abstractmethods__", ()))
    if abstract:
        raise TypeError(f"{printable(cls.__qualname__)} lacks the methods of a codec: {', '.join(abstract)}")
    name, wire_id = check_name("a codec", getattr(cls, "name", None)), getattr(cls, "wire_id", None)
    if type(wire_id) is not int or wire_id not in OUTSIDE:
        raise ValueError(
            f"the wire id of the codec {name!r} must be from {OUTSIDE.start} to {OUTSIDE.stop - 1}, "
            f"not {str(wire_id)[:32]!r}: lower ones are hybridcomp's own"
        )
    with _lock:
        for taken in (_BY_NAME.get(name), _BY_WIRE_ID.get(wire_id)):
            if taken is not None and _full_name(taken) != _full_name(cls):
                what = f"the name {name!r}" if taken.name == name else f"the wire id {wire_id}"
                raise ValueError(
                    f"{what} of a codec of {package_of(cls)} is that of the codec {taken.name!r} of {package_of(taken)}"
                )
        for taken in [found for found in _BY_NAME.values() if _full_name(found) == _full_name(cls)]:
            del _BY_NAME[taken.name], _BY_WIRE_ID[taken.wire_id]
        _BY_NAME[name] = _BY_WIRE_ID[wire_id] = cls
    return cls


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def package_of(cls: Class) -> str:
    """Return name and version of the package that a codec is of; of one that no package offers, its module."""
    return "hybridcomp" if is_own(cls) else ENTRY_POINTS.package_of(cls.__module__)


def is_own(cls: Class) -> bool:
    """Tell whether a codec is this package's."""
    wire_id: int = cls.wire_id
    return wire_id < OUTSIDE.start


def names() -> list[str]:
    """Return the names of all codecs, sorted: registered ones, and those that installed packages offer."""
    return sorted({*_BY_NAME, *ENTRY_POINTS.names()})


def own_names() -> list[str]:
    """Return the names of this package's codecs, sorted."""
    return sorted(name for name, cls in _BY_NAME.items() if is_own(cls))


def classes() -> list[Class]:
    """Return all registered codecs."""
    return list(_BY_NAME.values())


def find(name: str) -> Class | None:
    """Return the codec of a name, which an installed package may offer; None if there is none.

    Raises:
        ConfigError: a package offers it that cannot give it, or two do; names them.
    """
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    offer = ENTRY_POINTS.find(name)
    return None if offer is None else _take(offer)


def _take(offer: Offer) -> Class:
    """Register the codec that a package offers.

    Raises:
        ConfigError: it is none, or cannot be registered; names the package.
    """
    cls: Any = offer.load()
    called = getattr(cls, "name", None)
    if called != offer.name:
        raise offer.fault(f"{offer.point.value!r} has the name {str(called)[:64]!r}")
    try:
        register_codec(cls)
    except (ValueError, TypeError) as error:
        raise offer.fault(error) from error
    found: Class = cls
    return found


def codec_for(header: wire.Header) -> Class:
    """Find the codec class that decodes a message, which an installed package may offer.

    Raises:
        WireError: no codec has that wire id; names the package that is missing, as far as is known.
    """
    cls = _BY_WIRE_ID.get(header.codec)
    if cls is None:
        faults = _load_all() if header.codec in OUTSIDE else []
        cls = _BY_WIRE_ID.get(header.codec)
        if cls is None:
            raise WireError("; ".join([f"unknown codec id {header.codec}{_whose(header.codec)}", *faults]))
    return cls


def missing(name: str) -> str:
    """Say, for an error's text, of which package a codec of an unknown name is, as far as that is known."""
    for package, claimed in CLAIMED.values():
        if claimed == name:
            return f"{name} is a codec of the package {package!r}, which is not installed here; "
    package, dot, _ = name.partition(".")
    if not dot or not is_name(name):
        return ""
    return f"as a codec it would be of a package {package!r}, which is not installed here; "


def _whose(wire_id: int) -> str:
    if wire_id not in OUTSIDE:
        return ""
    if wire_id in CLAIMED:
        package, name = CLAIMED[wire_id]
        return f": {name!r} of the package {package!r} has it, which is not installed here"
    return ": it is of a package other than hybridcomp, which is not installed here"


def _load_all() -> list[str]:
    """Register all codecs that packages offer, once for each set of offers; return what is wrong with some."""
    offers = ENTRY_POINTS.offers()
    if not _loaded or _loaded[0][0] is not offers:
        faults = ENTRY_POINTS.faults().copy()
        for name in sorted(offers):
            try:
                find(name)
            except ConfigError as error:
                faults.append(str(error))
        _loaded[:] = [(offers, faults)]
    return _loaded[0][1]


_loaded: list[tuple[dict[str, list[Offer]], list[str]]] = []  # the latest
