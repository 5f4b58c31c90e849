"""Fit the profile's seconds of the engine and of the machine to measured cells, by the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hybridcomp.codecs import get_codec
from hybridcomp.lab.rate import Rate
from hybridcomp.perfmodel import Profile, Setting, Tier
from hybridcomp.perfmodel.simulated import seconds

Cell = dict[str, Any]
CHUNK = 1 << 20
_UNSHAPED = 2e9  # bytes per second: what the kernel copies
# Seconds, and factors of what was measured alone: memory's and codecs' speed, of links' rate and burst.
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
_PRIOR = 0.05  # how much a parameter's distance from its start counts
_STEPS = 25


def profile(base: Profile, found: dict[str, float], link: str) -> Profile:
    """Return a profile with fitted parameters, for a link."""
    rate = Rate.parse(link)
    given = {key: found[key] for key in found if hasattr(base, key)}
    given.pop("memory"), given.pop("codecs")
    speed = found["codecs"]
    codecs = {
        spec: dataclasses.replace(s, encode=s.encode * speed, decode=s.decode * speed, add=s.add * speed)
        for spec, s in base.codecs.items()
    }
    bytes_per_second = (rate.bits_per_second or 8 * _UNSHAPED) / 8
    burst = rate.burst_bytes * found["burst"] if rate.bits_per_second else 0.0
    return dataclasses.replace(
        base,
        **given,
        memory=base.memory * found["memory"],
        host=Tier(found["host latency"], base.host.bandwidth),
        network=Tier(found["network latency"], bytes_per_second * found["link"], burst),
        codecs=codecs,
    )


def setting(cell: Cell) -> Setting:
    """Return the setting of a cell; a send is between two hosts, whatever the other ranks do."""
    hosts, ppn = (2, 1) if cell["op"] == "send" else (cell["hosts"], cell["ppn"])
    return Setting(
        cell["op"], cell["nbytes"], 4, get_codec(cell["codec"]), hosts * ppn, hosts, ppn, compiled=True
    )


def predict(base: Profile, found: dict[str, float], cells: Sequence[Cell], cores: int) -> np.ndarray:
    """Return the predicted seconds of cells on hosts that share ``cores``."""
    profiles = {link: profile(base, found, link) for link in {cell["link"] for cell in cells}}
    return np.array(
        [seconds(profiles[cell["link"]], cell["algorithm"], setting(cell), CHUNK, cores) for cell in cells]
    )


def fit(base: Profile, cells: Sequence[Cell], cores: int) -> dict[str, float]:
    """Return the parameters under which the cells' predictions are nearest to their times, by logarithms."""
    names = list(START)
    start = np.log(list(START.values()))
    taken = np.array([cell["seconds"] for cell in cells])

    def residuals(x: np.ndarray) -> np.ndarray:
        found = dict(zip(names, np.exp(x).tolist(), strict=True))
        return np.concatenate([np.log(predict(base, found, cells, cores) / taken), _PRIOR * (x - start)])

    best = least_squares(residuals, start, loss="soft_l1", f_scale=0.1, max_nfev=_STEPS, diff_step=0.05)
    return dict(zip(names, np.exp(best.x).tolist(), strict=True))


def errors(predicted: np.ndarray, cells: Sequence[Cell]) -> dict[str, float]:
    """Return the geometric mean, the mean and the 95th percentile of the relative errors."""
    taken = np.array([cell["seconds"] for cell in cells])
    error = np.abs(predicted - taken) / taken
    return {
        "cells": len(cells),
        "geometric mean": float(np.exp(np.mean(np.log(np.maximum(error, 1e-4))))),
        "mean": float(error.mean()),
        "95th percentile": float(np.percentile(error, 95)),
    }
