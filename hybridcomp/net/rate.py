"""Read link rates in the syntax of ``tc``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridcomp.errors import ConfigError

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")
_SLOWEST = 8_000  # bit/s; below this a single packet takes more than a second


@dataclass(frozen=True)
class Rate:
    """Speed of a link in each direction; ``bits_per_second`` is None for an unshaped one."""

    bits_per_second: int | None

    @classmethod
    def parse(cls, text: str | None) -> Rate:
        """Read "200mbit", "1gbit", "2.5gbit", "64kbit"; "none" or None is an unshaped link.

        Raises:
            ConfigError: the text is anything else, or a rate below 8 kbit/s.
        """
        if text is None or text.strip().lower() == "none":
            return cls(None)
        match = _RATE.fullmatch(text.strip().lower())
        if match is None:
            raise ConfigError(
                f"rate {text!r} is not understood: write a number and one of bit, kbit, mbit, gbit "
                "(bits per second), as in 200mbit or 1gbit, or none for an unshaped link"
            )
        bits = round(float(match[1]) * _UNITS[match[2]])
        if bits < _SLOWEST:
            raise ConfigError(f"rate {text!r} is too slow to run anything: at least 8kbit is needed")
        return cls(bits)

    @property
    def burst_bytes(self) -> int:
        """Return the size of the token bucket: 4 ms of traffic, and never less than two of the largest packets."""
        # A timer tick late by up to 4 ms (CONFIG_HZ=250) must not cost bandwidth; a larger bucket would let
        # whole messages through free of charge.
        return max(128 * 1024, (self.bits_per_second or 0) // 8 // 250)

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "none"
        for unit in ("gbit", "mbit", "kbit"):
            if self.bits_per_second >= _UNITS[unit]:
                return f"{self.bits_per_second / _UNITS[unit]:.6g}{unit}"
        return f"{self.bits_per_second}bit"
