"""Check the tables and numbers of a parsed profile, which anybody may have written."""

from __future__ import annotations

from typing import Any, NoReturn

from hybridcomp.errors import ConfigError
from hybridcomp.files import shown
from hybridcomp.variables import LEAST, MOST

MOST_KEY = 200  # characters
_MOST_RANKS = 1 << 20


class Checker:
    """Checker of a document's values; every error is a ``ConfigError`` with the profile's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def numbers(
        self, key: str, table: Any, names: tuple[str, ...], options: tuple[str, ...] = ()
    ) -> dict[str, float]:
        """Return the numbers of a table that has all of ``names``, and may have some of ``options``."""
        self.table(key, table, names, options)
        return {name: self.number(f"{key}.{name}", value) for name, value in table.items()}

    def table(self, key: str, table: Any, names: tuple[str, ...], options: tuple[str, ...] = ()) -> None:
        """Check that a value is a table with all of ``names``, and otherwise only ``options``."""
        if not isinstance(table, dict):
            self.fail(key, f"must be a table of {', '.join(names)}, not {shown(table)}")
        self.keys(f"{key}.", table, names + options)
        for name in names:
            if name not in table:
                self.fail(f"{key}.{name}", "is missing")

    def number(self, key: str, value: Any, least: float = LEAST, most: float = MOST) -> float:
        """Return a number after checking that it lies between two others."""
        good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not good:  # NaN compares false
            self.fail(key, f"must be a number from {least:g} to {most:g}, not {shown(value)}")
        return float(value)

    def count(self, key: str, value: Any) -> int:
        """Return a number of hosts or ranks after checking it."""
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_RANKS:
            self.fail(key, f"must be an integer from 1 to {_MOST_RANKS}, not {shown(value)}")
        return value

    def keys(self, prefix: str, table: dict[str, Any], allowed: tuple[str, ...]) -> None:
        """Check that a table has no other keys than those allowed."""
        for key in table:
            if key not in allowed:
                self.fail(f"{prefix}{key[:MOST_KEY]}", f"is unknown; allowed: {', '.join(allowed)}")

    def fail(self, key: str, what: str) -> NoReturn:
        """Raise the error that names the profile, the key and what is wrong."""
        raise ConfigError(f"profile {self._name}: {key} {what}")
