"""Check timeouts: no comparison with NaN is true, so that a wait with such a timeout would never end."""

from __future__ import annotations

import math
from typing import Any

from hybridcomp.errors import ConfigError


def is_timeout(seconds: Any) -> bool:
    """Tell whether a timeout is a finite number of seconds, 0 or more."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    return number and math.isfinite(seconds) and seconds >= 0


def check_timeout(seconds: Any) -> float:
    """Check that a timeout is a finite number of seconds, 0 or more; return it.

    Raises:
        ConfigError: the timeout is no such number; says what is allowed.
    """
    if not is_timeout(seconds):
        raise ConfigError(f"timeout must be a finite number of seconds from 0 up, not {seconds!r}")
    return float(seconds)
