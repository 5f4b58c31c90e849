"""Predict measured cells by a profile that is fitted to some of them: a link's cells have a profile of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridcomp.codecs import get_codec
from hybridcomp.net.rate import Rate
from hybridcomp.perfmodel import Profile, Setting, fitting
from hybridcomp.perfmodel.fitting import Timing

Cell = dict[str, Any]
_UNSHAPED = 2e9  # bytes per second that the kernel copies


def of_link(base: Profile, link: str) -> Profile:
    """Return a profile with a link of the lab, which shapes what leaves a host."""
    rate = Rate.parse(link)
    shaped = rate.bits_per_second is not None
    network = dataclasses.replace(
        base.network,
        bandwidth=rate.bits_per_second / 8 if rate.bits_per_second else _UNSHAPED,
        burst=float(rate.burst_bytes) if shaped else 0.0,
        incoming=_UNSHAPED if shaped else 0.0,
    )
    return dataclasses.replace(base, network=network)


def timing(cell: Cell) -> Timing:
    """Return a cell's setting and time; a send counts as between two hosts of one rank each."""
    hosts, ppn = (2, 1) if cell["op"] == "send" else (cell["hosts"], cell["ppn"])
    codec = get_codec(cell["codec"])
    where = Setting(cell["op"], cell["nbytes"], 4, codec, hosts * ppn, hosts, ppn, compiled=True)
    return Timing(where, cell["algorithm"], cell["seconds"])


def fit(base: Profile, cells: Sequence[Cell], cores: int) -> dict[str, float]:
    """Return the parameters of one link's cells, on hosts that share ``cores``."""
    return fitting.fit(of_link(base, cells[0]["link"]), [timing(cell) for cell in cells], cores)


def predict(base: Profile, found: Mapping[str, float], cells: Sequence[Cell], cores: int) -> np.ndarray:
    """Return the predicted seconds of one link's cells."""
    profile = fitting.adjusted(of_link(base, cells[0]["link"]), found)
    return fitting.predict(profile, [timing(cell) for cell in cells], cores)


def errors(predicted: np.ndarray, cells: Sequence[Cell]) -> dict[str, float]:
    """Return the errors of predicted cells."""
    return fitting.errors(predicted, [cell["seconds"] for cell in cells])
