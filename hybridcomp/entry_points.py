"""Find what other packages add to this one: the entry points of a group, such as ``hybridcomp.codecs``.

Nothing is read before a name is asked for that this package lacks, and what a package offers is imported when it is
asked for by its name. Names, versions and files are of other people: a package whose metadata cannot be read is passed
over, and said where a name is not found; one that offers what it cannot give is an error that names it. Neither stands
in the way of the others.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridcomp.errors import ConfigError, printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NAME = re.compile(r"[a-z][a-z0-9]*([._-][a-z0-9]+)*")
_MOST_NAME = 64  # characters


def is_name(name: object) -> bool:
    """Tell whether a codec or an algorithm may be called so in spec strings, variables and policies."""
    return (
        isinstance(name, str)
        and len(name) <= _MOST_NAME
        and _NAME.fullmatch(name) is not None
        and not name.endswith(".toml")
    )


def check_name(what: str, name: object) -> str:
    """Return a name from outside after checking it.

    Args:
        what: kind of thing that has the name, for the error.
        name: name to check.

    Raises:
        ValueError: it is no string, or not of lower-case letters and digits, with single ``.``, ``_`` or ``-`` between.
    """
    if not is_name(name):
        raise ValueError(
            f"the name of {what} must be of lower-case letters and digits, with '.', '_' or '-' between, at most "
            f"{_MOST_NAME} characters, and not end in .toml; not {str(name)[:_MOST_NAME]!r}"
        )
    return str(name)


@dataclass(frozen=True, slots=True)
class Offer:
    """Entry point of a package.

    Attributes:
        name: name under which the package offers it.
        package: name and version of the package.
        module: top-level module that it is in.
        point: entry point itself.
    """

    name: str
    package: str
    module: str
    point: EntryPoint = field(repr=False)

    def load(self) -> Any:
        """Import what is offered.

        Raises:
            ConfigError: that fails; names the package, the entry point and the error.
        """
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:  # whatever another package's code raises as it is imported
            why = f"{type(error).__name__}: {error}"
            raise self.fault(f"importing {self.point.value!r} failed with {printable(why)}") from error

    def fault(self, why: object) -> ConfigError:
        """Return the error for an offer that cannot be used."""
        return ConfigError(
            f"the package {self.package} offers {self.name!r} in {self.point.group}, but {why}"
        )


class EntryPoints:
    """Entry points of a group, of all installed packages.

    Args:
        group: name of the group.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._path: tuple[str, ...] = ()
        self._offers: dict[str, list[Offer]] | None = None
        self._faults: list[str] = []

    def offers(self) -> dict[str, list[Offer]]:
        """Return all offers by name, without names of a wrong form; read anew where ``sys.path`` has changed."""
        with self._lock:
            path = tuple(map(str, sys.path))
            if self._offers is None or self._path != path:
                self._path = path
                self._offers, self._faults = _read(self.group)
            return self._offers

    def faults(self) -> list[str]:
        """Return what is wrong with packages whose offers cannot be read."""
        self.offers()
        return self._faults

    def names(self) -> list[str]:
        """Return the names on offer, sorted; nothing is imported."""
        return sorted(self.offers())

    def find(self, name: str) -> Offer | None:
        """Return the offer of a name, or None.

        Raises:
            ConfigError: two packages offer it; names both.
        """
        found = self.offers().get(name, [])
        if len(found) > 1:
            packages = " and ".join(offer.package for offer in found)
            raise ConfigError(
                f"the packages {packages} both offer {name!r} in {self.group}: uninstall one of them"
            )
        return found[0] if found else None

    def package_of(self, module: str) -> str:
        """Return name and version of the package that a module is of, as far as its entry points say.

        Args:
            module: full name of the module; one of no such package is itself the name.
        """
        top = module.partition(".")[0]
        packages = {o.package for found in self.offers().values() for o in found if o.module == top}
        return min(packages, default=f"module {printable(top)}")


def _read(group: str) -> tuple[dict[str, list[Offer]], list[str]]:
    metadata = importlib.import_module("importlib.metadata")  # takes milliseconds, which few programs need
    found: dict[str, list[Offer]] = {}
    seen: set[str] = set()
    faults: list[str] = []
    for distribution in metadata.distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = str(distribution.name)
            package = printable(f"{name} {distribution.version}")[: 2 * _MOST_NAME]
            points = [point for point in distribution.entry_points if point.group == group]
        except Exception as error:  # files of other packages, of which any may be damaged
            where = getattr(distribution, "_path", "")
            faults.append(printable(f"the entry points in {where} cannot be read: {error}"))
            continue
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:  # the first on the path is the one that is imported
            continue
        seen.add(key)
        for point in points:
            if is_name(point.name):
                module = point.value.partition(":")[0].partition(".")[0].strip()
                found.setdefault(point.name, []).append(Offer(point.name, package, module, point))
            else:
                faults.append(f"the package {package} offers {point.name[:_MOST_NAME]!r}, which is no name")
    return found, faults
