"""Fit a profile's costs of the engine and of the machine to measured times of collectives, by the simulator.

Each parameter is a cost in seconds, or a factor on a value that was measured alone: links, memory and codecs. A fit
keeps predictions near the times by their logarithms, and parameters near their starts, so that times which hardly
depend on a parameter leave it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.perfmodel.profile import Profile, Tier
from hybridcomp.perfmodel.simulated import seconds
from hybridcomp.perfmodel.terms import Setting
from hybridcomp.variables import LEAST

CHUNK = 1 << 20  # uncompressed bytes of a message
START = {
    "start": 20e-6,
    "slow_start": 500e-6,
    "near": 3e-6,
    "far": 50e-6,
    "wire": 1e-10,
    "wake": 30e-6,
    "look": 5e-6,
    "call": 1e-6,
    "eager": 16384.0,
    "host latency": 3e-6,
    "network latency": 60e-6,
    "link": 0.95,
    "burst": 0.5,
    "memory": 1.0,
    "codecs": 1.0,
}
_OF_NETWORK = ("far", "wire", "eager", "network latency", "link", "burst")
_OF_HOST = ("near", "host latency")
_FACTORS = ("link", "burst", "memory", "codecs")
_PRIOR = 0.05  # weight of a parameter's distance from its start
_LOOSE = 0.1  # error in a logarithm from which on it counts less than by its square
_STEPS = 25
_STEP = 0.15  # step of a logarithm for slopes: over smaller ones, simulated times are no smooth functions
_FARTHEST = math.log(50)  # distance of a parameter from its start, at most
_LEAST = 1e-4  # smallest relative error that counts

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time.

    Attributes:
        setting: operation, bytes, codec, ranks.
        algorithm: algorithm of the operation, with messages of :data:`CHUNK` bytes before they are encoded.
        seconds: time from the start of all ranks until the last one has its result.
    """

    setting: Setting
    algorithm: str
    seconds: float


def parameters(base: Profile, timings: Sequence[Timing]) -> dict[str, float]:
    """Return the parameters on which the times depend, with the values at which a fit starts.

    Args:
        base: profile; ``burst`` is a parameter if its links have one.
        timings: times of collectives.
    """
    settings = [timing.setting for timing in timings]
    idle: set[str] = set()
    if all(s.hosts == 1 for s in settings):
        idle.update(_OF_NETWORK)
    if not base.network.burst:
        idle.add("burst")
    if all(s.ranks_per_host == 1 for s in settings):
        idle.update(_OF_HOST)
    if all(s.op != "reduce" for s in settings):
        idle.add("slow_start")
    if all(s.codec.name == "none" for s in settings):
        idle.add("codecs")
    return {name: value for name, value in START.items() if name not in idle}


def adjusted(base: Profile, found: Mapping[str, float]) -> Profile:
    """Return a profile with the parameters that were found; the others are as in ``base``."""
    network, host = base.network, base.host
    costs: dict[str, Any] = {
        name: value for name, value in found.items() if name not in _FACTORS and not name.endswith("latency")
    }
    speed = found.get("codecs", 1.0)
    return dataclasses.replace(
        base,
        **costs,
        memory=base.memory * found.get("memory", 1.0),
        host=dataclasses.replace(host, latency=found.get("host latency", host.latency)),
        network=Tier(
            found.get("network latency", network.latency),
            network.bandwidth * found.get("link", 1.0),
            network.burst * found.get("burst", 1.0),
            network.incoming,
        ),
        codecs={
            spec: dataclasses.replace(s, encode=s.encode * speed, decode=s.decode * speed, add=s.add * speed)
            for spec, s in base.codecs.items()
        },
    )


def predict(profile: Profile, timings: Sequence[Timing], cores: int | None = None) -> Floats:
    """Return the predicted seconds of each timing, on hosts that share ``cores`` unless that is None."""
    return np.array([seconds(profile, t.algorithm, t.setting, CHUNK, cores) for t in timings])


def fit(
    base: Profile, timings: Sequence[Timing], cores: int | None = None, limit: float = math.inf
) -> dict[str, float]:
    """Return the parameters under which predictions are nearest to the times. Needs SciPy.

    Args:
        base: profile with links, memory and codecs as measured alone.
        timings: at least one.
        cores: cores that all ranks of all hosts share; by default the profile's.
        limit: seconds after which the best parameters found are returned.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # noqa: PLC0415  (of the extra "plan")

    begin = time.monotonic()
    start = parameters(base, timings)
    origin = np.log(list(start.values()))
    taken = np.log([timing.seconds for timing in timings])
    best, least = origin, math.inf

    def residuals(x: Floats) -> Floats:
        nonlocal best, least
        if time.monotonic() - begin > limit and least < math.inf:
            raise _OutOfTimeError
        profile = adjusted(base, dict(zip(start, np.exp(x).tolist(), strict=True)))
        found: Floats = np.concatenate(
            [np.log(predict(profile, timings, cores)) - taken, _PRIOR * (x - origin)]
        )
        cost = float(np.sum(np.sqrt(1 + (found / _LOOSE) ** 2) - 1))
        if cost < least:
            best, least = x.copy(), cost
        return found

    with contextlib.suppress(_OutOfTimeError):
        least_squares(
            residuals,
            origin,
            bounds=(origin - _FARTHEST, origin + _FARTHEST),
            loss="soft_l1",
            f_scale=_LOOSE,
            max_nfev=_STEPS,
            diff_step=_STEP,
        )
    return {
        name: max(LEAST, float(f"{value:.4g}"))
        for name, value in zip(start, np.exp(best).tolist(), strict=True)
    }


def errors(predicted: npt.ArrayLike, taken: npt.ArrayLike) -> dict[str, float]:
    """Return the geometric mean, the mean and the 95th percentile of the relative errors, with their number.

    Args:
        predicted, taken: predicted and measured seconds of the same operations, in the same order.
    """
    measured = np.asarray(taken, float)
    error = np.abs(np.asarray(predicted, float) - measured) / measured
    return {
        "cells": len(error),
        "geometric mean": float(np.exp(np.mean(np.log(np.maximum(error, _LEAST))))),
        "mean": float(error.mean()),
        "95th percentile": float(np.percentile(error, 95)),
    }


class _OutOfTimeError(Exception):
    """End of the time for a fit."""
