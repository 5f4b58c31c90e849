"""Change the number of ``sidco``'s stages by the results of its fits: ``sidco``.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems"
(SIDCo, MLSys 2021, arXiv:2101.10761): the fit of a distribution, or a few on the survivors of one another, give the
limit that a share ``ratio`` of the elements is to reach. The number of fits needed depends on the data, and changes. A
measured step, one of ``every``, counts the elements that reach the limit. Where they are more than 1 + ``drift``
times the share, one stage fewer is made from then on; where they are less than 1 - ``drift`` times it, one more: from 1
to ceil(ln(ratio) / ln(1/2)) stages.

The elements are those of a sample, whose fit is the codec's own, each counted as many times as the tensor has
elements for one of the sample. By default every tensor has a number of its own: with the number that is right for a
normal distribution, too many elements reach the limit where tails are heavy. Zeros are never sent: a tensor whose
other elements are fewer than its share is expected to send those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridcomp.arrays import flatten
from hybridcomp.codecs import Codec
from hybridcomp.codecs.sparse.sidco import MOST_STAGES, SIDCoCodec
from hybridcomp.policy.adapt.controller import Array, Controller

_ALL = ""


class SidcoController(Controller):
    """Controller of ``sidco``: the numbers of stages in use.

    Args:
        codec: ``sidco``; its stages are those of the first steps, or one where it counts them itself.
        options: options of ``sidco``.
    """

    least_sample = 1 << 15

    def __init__(self, codec: Codec, options: Mapping[str, Any]) -> None:
        super().__init__(codec)
        assert isinstance(codec, SIDCoCodec)
        self._every: int = options["every"]
        self._drift: float = options["drift"]
        self._all = options["scope"] == "all"
        self._most = most_stages(codec.ratio_kept)
        self._first = self._with(min(codec.stages or 1, self._most))
        self._found: dict[str, Array] = {}  # elements that reach the limit, and expected ones, by tensor
        self._names: list[str] = []  # tensors of the last figures
        self._codecs: dict[str, SIDCoCodec] = {}
        self._note(0, self._first, "first")

    def _with(self, stages: int) -> SIDCoCodec:
        codec = self._variant(stages=stages)
        assert isinstance(codec, SIDCoCodec)
        return codec

    @property
    def stages(self) -> dict[str, int]:
        """Return the numbers of stages by tensor, by ``""`` where all share one; without unchanged ones."""
        return {name: codec.stages for name, codec in self._codecs.items()}

    def measures(self, step: int) -> bool:
        return step % self._every == 0

    def add(self, name: str, values: Array, share: float) -> None:
        key = _ALL if self._all else name
        codec = self._codecs.get(key, self._first)
        found = self._found.setdefault(key, np.zeros(2))
        wanted = min(codec.k(values.size), np.count_nonzero(values))
        if wanted:
            magnitudes = np.abs(values)
            reached = np.count_nonzero((magnitudes >= codec.limit(flatten(values))) & (magnitudes > 0))
            found += np.array([reached, wanted]) / share

    def figures(self, seconds: float) -> Array:
        self._names = sorted(self._found)
        found = np.array([self._found[name] for name in self._names]).ravel()
        self._found.clear()
        return found

    def decide(self, everyone: Array, step: int) -> bool:
        if not self._names:
            return False
        changed = False
        for name, (reached, wanted) in zip(
            self._names, everyone.sum(axis=0).reshape(-1, 2).tolist(), strict=True
        ):
            stages = self._codecs.get(name, self._first).stages
            part = reached / wanted if wanted else 1.0
            move = -1 if part > 1 + self._drift else 1 if part < 1 - self._drift else 0
            if min(max(stages + move, 1), self._most) != stages:
                changed = True
                self._codecs[name] = self._with(stages + move)
                self._note(step, self._codecs[name], f"{part:.3g} of the share", name)
        return changed

    def current(self, name: str) -> tuple[Codec, str]:
        return self._codecs.get(_ALL if self._all else name, self._first), "sidco"

    def state(self) -> dict[str, Any]:
        return {"stages": self.stages, "names": self._names}

    def load(self, state: dict[str, Any]) -> None:
        self._names = state["names"]
        self._codecs = {name: self._with(int(stages)) for name, stages in state["stages"].items()}


def most_stages(ratio: float) -> int:
    """Return the most stages for a ratio: as many halves as lead to it, at least one, at most the codec's."""
    return min(max(1, math.ceil(math.log(ratio) / math.log(0.5))), MOST_STAGES)
