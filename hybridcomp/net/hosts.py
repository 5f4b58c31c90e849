"""Read the rates and cores of a lab's hosts: one value for all of them, or one for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, cast

from hybridcomp.errors import ConfigError
from hybridcomp.net.rate import Rate

LEAST_CORES = 0.1  # a tenth of the keeper's period is the least that the kernel hands out

T = TypeVar("T")


def rates_of(rate: str | Rate | Sequence[str | Rate | None] | None, hosts: int) -> tuple[Rate, ...]:
    """Read the rates of hosts' links.

    Args:
        rate: one for all, or one for each host: a sequence, or text with commas ("1gbit,1gbit,200mbit").
        hosts: number of hosts.

    Raises:
        ConfigError: the number of rates is another, or one is not understood.
    """
    found = [one if isinstance(one, Rate) else Rate.parse(cast("str | None", one)) for one in _listed(rate)]
    return _each(found, hosts, "rate")


def cores_of(cores: str | float | Sequence[float | None] | None, hosts: int) -> tuple[float | None, ...]:
    """Read how many of this machine's processor cores each host may use.

    Args:
        cores: one number for all, or one for each host: a sequence, or text with commas ("all,0.25,1"); "all" or None:
            as many as there are.
        hosts: number of hosts.

    Raises:
        ConfigError: the number of values is another, or one is not a number of at least 0.1.
    """
    return _each([_cores(one) for one in _listed(cores)], hosts, "number of cores")


def slowest(rates: Sequence[Rate]) -> Rate:
    """Return the lowest rate."""
    return min(rates, key=lambda rate: math.inf if rate.bits_per_second is None else rate.bits_per_second)


def _cores(given: object) -> float | None:
    if given is None or str(given).strip() == "all":
        return None
    try:
        cores = float(str(given))
    except ValueError:
        cores = math.nan
    if not LEAST_CORES <= cores < math.inf:
        raise ConfigError(f"a host's cores must be a number from {LEAST_CORES}, or all, not {given!r}")
    return cores


def _listed(values: object) -> Sequence[object]:
    if isinstance(values, str):
        return values.split(",")
    return values if isinstance(values, Sequence) else [values]


def _each(values: list[T], hosts: int, name: str) -> tuple[T, ...]:
    if len(values) not in (1, hosts):
        raise ConfigError(f"a lab of {hosts} hosts takes one {name} for all, or {hosts}, not {len(values)}")
    return tuple(values * hosts if len(values) == 1 else values)
