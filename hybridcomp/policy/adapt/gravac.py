"""Choose the ratio of top-k by its share of the gradient's norm and by a step's time: ``gravac``.

Tyagi and Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training", CLOUD 2023,
arXiv:2305.12201. Ratios are ``first``, that times ``factor``, and so on to ``least``. Their gain is ::

    gain(r) = sum over tensors ||C_r(g + e)|| / sum over tensors ||g + e||

averaged exponentially over measured steps, with weight ``alpha`` for the newest. A ratio is sent if its gain is at
least ``eps``; else ``first`` is, if its gain is; else all of the gradient. One ratio after the other is tried for
``window`` steps. Its score is its gain over the seconds of a step. Where the two best scores differ by less than
``omega`` the smaller ratio of the two is kept from then on, else the best one when all were tried, or the next one has
too little gain.

The authors run two compressors with residuals of their own. Here one residual is kept, and the gains of all ratios
come from a sample of the elements, in every ``every``-th step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from hybridcomp.codecs import Codec, get_codec
from hybridcomp.policy.adapt.controller import Array, Controller

_NONE = get_codec("none")
_DENSE = -1  # stands in the place of a ratio's number


class GravacController(Controller):
    """Controller of ``gravac``: the state of the search.

    Args:
        codec: codec with a ratio.
        options: options of ``gravac``.
    """

    def __init__(self, codec: Codec, options: Mapping[str, Any]) -> None:
        super().__init__(codec)
        self._eps, self._omega = options["eps"], options["omega"]
        self._alpha, self._window = options["alpha"], options["window"]
        self._every: int = options["every"]
        self.ratios = ladder(options["first"], options["factor"], options["least"])
        self._variants = [self._variant(ratio=ratio) for ratio in self.ratios]
        self._sums = np.zeros(1 + len(self.ratios))
        self._means: Array | None = None  # mean norms: of the gradient, and of each ratio's part of it
        self._tried, self._since = 0, 0  # number of the ratio that is tried, and the step of its first trial
        self._kept: int | None = None  # number of the ratio with which the search has ended
        self._seconds: list[float] = []
        self._scores: dict[int, float] = {}
        self._sent = _DENSE
        self._note(0, _NONE, "no figures yet")

    @property
    def sent(self) -> float | None:
        """Return the ratio that is sent; None for all of the gradient."""
        return None if self._sent == _DENSE else self.ratios[self._sent]

    @property
    def gains(self) -> list[float]:
        """Return the gain of each ratio; empty before the first measured step."""
        return [] if self._means is None else (self._means[1:] / max(self._means[0], math.ulp(0))).tolist()

    @property
    def searching(self) -> bool:
        """Tell whether ratios are still tried."""
        return self._kept is None

    def measures(self, step: int) -> bool:
        return step % self._every == 0

    def add(self, name: str, values: Array, share: float) -> None:
        if values.size:
            kept = kept_squares(values, self.ratios)
            squares = np.array([float(values @ values), *kept])
            self._sums += np.sqrt(squares / share)

    def figures(self, seconds: float) -> Array:
        found = np.append(self._sums, seconds)
        self._sums = np.zeros_like(self._sums)
        return found

    def decide(self, everyone: Array, step: int) -> bool:
        norms, seconds = everyone[:, :-1].sum(axis=0), float(everyone[:, -1].max())
        if not np.isfinite(norms).all() or not norms[0]:
            return False
        self._means = norms if self._means is None else self._alpha * norms + (1 - self._alpha) * self._means
        gains = self.gains
        searching = self.searching
        if searching:
            self._search(gains, seconds, step)
        wanted = self._tried if self._kept is None else self._kept
        before, self._sent = self._sent, next((i for i in (wanted, 0) if gains[i] >= self._eps), _DENSE)
        if self._sent == before and self.searching == searching:
            return False
        self._seconds, self._since = [], step
        how = f"gain {gains[max(self._sent, 0)]:.3g}"
        self._note(step, self.current("")[0], how if self._kept is None else f"{how}, search ended")
        return True

    def _search(self, gains: list[float], seconds: float, step: int) -> None:
        """Score the tried ratio once its window has passed, and go on to the next, or end."""
        if self._sent == self._tried and math.isfinite(seconds):
            self._seconds.append(seconds)
        if gains[self._tried] < self._eps:
            if self._scores:  # smaller ratios keep less
                self._kept = self._best()[0]
            return
        if step - self._since < self._window or not self._seconds:
            return
        self._scores[self._tried] = gains[self._tried] / median(self._seconds)
        best = self._best()
        if len(best) > 1 and 1 - self._scores[best[1]] / self._scores[best[0]] < self._omega:
            self._kept = max(best[:2])
        elif self._tried + 1 == len(self.ratios):
            self._kept = best[0]
        else:
            self._tried += 1

    def _best(self) -> list[int]:
        """Return the numbers of the ratios that were scored, the best first."""
        return sorted(self._scores, key=lambda number: -self._scores[number])

    def current(self, name: str) -> tuple[Codec, str]:
        if self._sent == _DENSE:
            return _NONE, f"gravac: less than {self._eps:g} kept by {self.ratios[0]:g}"
        return self._variants[self._sent], "gravac: tried" if self.searching else "gravac"

    def state(self) -> dict[str, Any]:
        return {
            "means": None if self._means is None else self._means.tolist(),
            "tried": self._tried,
            "since": self._since,
            "kept": self._kept,
            "seconds": self._seconds,
            "scores": [[number, score] for number, score in self._scores.items()],
            "sent": self._sent,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._means = None if state["means"] is None else np.array(state["means"])
        self._tried, self._since, self._kept = state["tried"], state["since"], state["kept"]
        self._seconds, self._sent = list(state["seconds"]), state["sent"]
        self._scores = dict(map(tuple, state["scores"]))


def ladder(first: float, factor: float, least: float) -> list[float]:
    """Return ``first``, ``first * factor``, and so on, as far as they are above ``least``, and ``least``."""
    found = [first]
    while found[-1] * factor > least * (1 + 1e-9):
        found.append(float(f"{found[-1] * factor:.6g}"))  # few digits, since people read specs
    return found if found[-1] == least else [*found, least]


def kept_squares(values: Array, ratios: list[float]) -> list[float]:
    """Return, for each ratio, the sum of squares of that share of the values [m] with the largest magnitudes.

    A part of an element counts as that part of its square.
    """
    squares = values * values
    m = squares.size
    top = min(m, math.ceil(max(ratios) * m) + 1)
    largest = np.sort(np.partition(squares, m - top)[m - top :])[::-1]
    sums = np.concatenate([[0.0], np.cumsum(largest)])
    return [float(v) for v in np.interp([ratio * m for ratio in ratios], np.arange(top + 1), sums)]
