"""Keep a threshold between rare refreshes: ``dct``.

Gupta et al., "Training Recommender Models at Scale: Communication-Efficient Model and Data Parallelism" (KDD 2021,
arXiv:2010.08899): of a gradient with the residual added, c, the elements of at least a magnitude tau are sent, and tau
is the (1 - ``density``) quantile of abs(c), found anew every ``every`` steps only. Quantiles are those of a sample, the
mean of all ranks'. Every ``check`` steps the share of elements that reach tau is estimated as well: where it has left
``density`` by more than ``drift`` of it, tau is refreshed early. A new tau is looked at sooner, too: 1, 2, 4, 8 and so
on steps after a refresh. With error feedback residuals gather just below tau, so that a quantile moves it by a few
percent only, and the share of elements that it lets through is the wanted one for one step: looks in quick succession
take tau to where the share stays.

``scope=all`` has one tau for all tensors of an axis and operation, ``scope=tensor`` one for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridcomp.codecs import Codec
from hybridcomp.policy.adapt.controller import Array, Controller
from hybridcomp.policy.adapt.thresholds import is_stale, threshold_of, upper_quantile

_ALL = ""


class DctController(Controller):
    """Controller of ``dct``: the thresholds in use.

    Args:
        codec: codec of the first steps, before a threshold is known.
        options: options of ``dct``.
    """

    least_sample = 1 << 15

    def __init__(self, codec: Codec, options: Mapping[str, Any]) -> None:
        super().__init__(codec)
        self._density, self._drift = options["density"], options["drift"]
        self._every: int = options["every"]
        self._check: int = min(options["check"], self._every)
        self._all = options["scope"] == "all"
        self._samples: dict[str, list[tuple[Array, float]]] = {}
        self._names: list[str] = []  # tensors of the last figures
        self._taus: dict[str, float] = {}
        self._codecs: dict[str, Codec] = {}
        self._refreshed = 0  # step of the last refresh that was due
        self._found = 0  # step of the last refresh of any kind

    @property
    def thresholds(self) -> dict[str, float]:
        """Return tau by tensor; by ``""`` where all tensors share one."""
        return dict(self._taus)

    def measures(self, step: int) -> bool:
        age = step - self._found  # at 0 a new tau lets through all that has gathered below the last one
        doubled = 0 < age < self._check and age & (age - 1) == 0
        return step % self._check == 0 or doubled

    def add(self, name: str, values: Array, share: float) -> None:
        key = _ALL if self._all else name
        self._samples.setdefault(key, []).append((np.abs(values), 1 / share))

    def figures(self, seconds: float) -> Array:
        self._names = sorted(self._samples)
        found = [self._figures_of(name) for name in self._names]
        self._samples.clear()
        return np.array(found).ravel()

    def _figures_of(self, name: str) -> tuple[float, float]:
        """Return the quantile of a key's magnitudes, and the share of those that reach its threshold.

        Both are NaN where none of its values can be used.
        """
        values = np.concatenate([part for part, _ in self._samples[name]])
        if not values.size:
            return math.nan, math.nan
        weights = np.concatenate([np.full(part.size, weight) for part, weight in self._samples[name]])
        reached = float(weights[values >= self._taus.get(name, np.inf)].sum() / weights.sum())
        return upper_quantile(values, weights, self._density), reached

    def decide(self, everyone: Array, step: int) -> bool:
        finite = np.isfinite(everyone)
        if not finite.any():
            return False
        # The means are those of the ranks whose values can be used: 0, which is no threshold, where there are none.
        means = everyone.sum(axis=0, where=finite) / np.maximum(finite.sum(axis=0), 1)
        quantiles, densities = means.reshape(-1, 2).T
        due = step - self._refreshed >= self._every
        changed = False
        for name, quantile, density in zip(self._names, quantiles.tolist(), densities.tolist(), strict=True):
            known = name in self._taus
            drifted = known and is_stale(density, self._density, self._drift)
            tau = threshold_of(quantile)
            if tau is not None and (due or drifted or not known):
                changed = True
                self._taus[name], self._codecs[name] = tau, self._variant(rel=None, abs=tau)
                self._note(step, self._codecs[name], f"density {density:.3g}" if known else "first", name)
        if due:
            self._refreshed = step
        if changed:
            self._found = step
        return changed

    def current(self, name: str) -> tuple[Codec, str]:
        found = self._codecs.get(_ALL if self._all else name)
        return (self._codec, "dct: no threshold yet") if found is None else (found, "dct")

    def state(self) -> dict[str, Any]:
        refreshed, found = self._refreshed, self._found
        return {"taus": self._taus, "refreshed": refreshed, "found": found, "names": self._names}

    def load(self, state: dict[str, Any]) -> None:
        self._taus, self._refreshed, self._names = dict(state["taus"]), state["refreshed"], state["names"]
        self._found = state["found"]
        self._codecs = {name: self._variant(rel=None, abs=tau) for name, tau in self._taus.items()}
