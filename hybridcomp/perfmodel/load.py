"""Find the profile of this machine: a file, or the built-in one with the environment's values for links."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from hybridcomp import variables
from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import read_bytes, read_text
from hybridcomp.perfmodel.profile import BUILT_IN, MAX_BYTES, Profile, Tier

_PAYLOAD = 0.936  # share of a link's rate that is left of headers of TCP over Ethernet
_INTERFACES = Path("/sys/class/net")
_ADAPTERS = Path("/sys/class/infiniband")


def wanted_path() -> Path:
    """Return the profile's path, whether or not it exists: ``HYBRIDCOMP_PROFILE``, else in the user's configuration."""
    named = variables.PROFILE.read()
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
            bytes/s, or else :func:`interface_rate`; ``HYBRIDCOMP_LATENCY`` in seconds, ``HYBRIDCOMP_BURST`` in bytes)
            and for the cores of a rank (``HYBRIDCOMP_CORES``).

    Raises:
        ConfigError: a named file is missing, or a file or variable is wrong.
    """
    named = path or variables.PROFILE.read()
    place = Path(named) if named else wanted_path()
    if not os.path.lexists(place):
        if not named:
            return _built_in()
        told = "" if path else f"; {variables.PROFILE} names it"
        raise ConfigError(f"profile {printable(place)} does not exist{told}")
    return Profile.from_bytes(read_bytes(place, what="profile", most=MAX_BYTES), str(place))


def _built_in() -> Profile:
    """Return the built-in profile, with the rate of this host's interfaces and the environment's values."""
    network = BUILT_IN.network
    tier = Tier(
        variables.LATENCY.read() or network.latency,
        variables.BANDWIDTH.read() or interface_rate() or network.bandwidth,
        variables.BURST.read() or network.burst,
    )
    cores = variables.CORES.read()
    return dataclasses.replace(BUILT_IN, network=tier, cores=cores or BUILT_IN.cores)


@functools.cache
def interface_rate() -> float | None:
    """Return the bytes/s that the fastest network interface of this host can send; None where none tells its rate.

    Virtual interfaces are not asked: they tell no rate, or one that has nothing to do with the link behind them.
    """
    megabits = 0.0
    with contextlib.suppress(OSError):  # the process may have no file left to open
        for rate in _rates():
            megabits = max(megabits, rate)
    return megabits * 1e6 / 8 * _PAYLOAD if megabits > 0 else None


def _rates() -> Iterator[float]:
    """Yield the rates in Mb/s that interfaces and InfiniBand adapters tell; those that are down tell 0 or less."""
    for interface in _INTERFACES.glob("*/device"):
        with contextlib.suppress(OSError, ValueError, ConfigError):
            yield float(read_text(interface.parent / "speed"))
    for port in _ADAPTERS.glob("*/ports/*/rate"):  # "100 Gb/sec (4X EDR)"
        with contextlib.suppress(OSError, ValueError, ConfigError):
            yield float(read_text(port).partition(" ")[0]) * 1e3
