"""Find the profile of this machine: a file, or the built-in one with the environment's values for links."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel.checks import LEAST, MOST
from hybridcomp.perfmodel.profile import BUILT_IN, MAX_BYTES, Profile, Tier

VARIABLE = "HYBRIDCOMP_PROFILE"
BANDWIDTH_VARIABLE = "HYBRIDCOMP_BANDWIDTH"
BURST_VARIABLE = "HYBRIDCOMP_BURST"
LATENCY_VARIABLE = "HYBRIDCOMP_LATENCY"
CORES_VARIABLE = "HYBRIDCOMP_CORES"


def wanted_path() -> Path:
    """Return the profile's path, whether or not it exists: ``HYBRIDCOMP_PROFILE``, else in the user's configuration."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    given = os.environ.get("XDG_CONFIG_HOME")
    home = Path(given) if given else Path.home() / ".config"
    return home / "hybridcomp" / "profile.toml"


def load_profile(path: str | os.PathLike[str] | None = None) -> Profile:
    """Read a profile.

    Args:
        path: file of the profile. None: the one at :func:`wanted_path`, or :data:`BUILT_IN` where the user's
            configuration has none, with the environment's values for links between hosts (``HYBRIDCOMP_BANDWIDTH`` in
            bytes/s, ``HYBRIDCOMP_LATENCY`` in seconds, ``HYBRIDCOMP_BURST`` in bytes) and for the cores of a rank
            (``HYBRIDCOMP_CORES``).

    Raises:
        ConfigError: a named file is missing, or a file or variable is wrong.
    """
    named = path or os.environ.get(VARIABLE)
    place = Path(named) if named else wanted_path()
    try:
        with place.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        if not named:
            return _built_in()
        raise ConfigError(f"profile {place} does not exist") from None
    except OSError as error:
        raise ConfigError(f"cannot read profile {place}: {error.strerror}") from error
    return Profile.from_bytes(data, str(place))


def _built_in() -> Profile:
    """Return the built-in profile, with the environment's values."""
    network = BUILT_IN.network
    tier = Tier(
        _environment(LATENCY_VARIABLE, "seconds, such as 2e-5") or network.latency,
        _environment(BANDWIDTH_VARIABLE, "bytes per second, such as 125e6") or network.bandwidth,
        _environment(BURST_VARIABLE, "bytes, such as 5e5", least=0.0) or network.burst,
    )
    cores = _environment(CORES_VARIABLE, "a number of cores up to 1, such as 0.5", most=1.0)
    return dataclasses.replace(BUILT_IN, network=tier, cores=cores or BUILT_IN.cores)


def _environment(name: str, allowed: str, *, least: float = LEAST, most: float = MOST) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise ConfigError(f"{name} is {text!r}; allowed: {allowed}")
    return number
