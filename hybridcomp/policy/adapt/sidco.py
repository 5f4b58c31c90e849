"""Move the number of ``sidco``'s stages by what its fits find: ``sidco``.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems"
(SIDCo, MLSys 2021, arXiv:2101.10761): the fit of a distribution, or a few on the survivors of one another, give the
limit that a share ``ratio`` of the elements is to reach. How many fits it takes depends on the data, and changes. In a
measured step, one of ``every``, the elements are counted that reach the limit. Where they are more than 1 + ``drift``
times the share, one stage fewer is made from then on; where they are less than 1 - ``drift`` times it, one more: from 1
to ceil(ln(ratio) / ln(1/2)) stages.

Elements are those of a sample, whose fit is the codec's own. They are counted over all tensors and ranks, each as many
times as there are elements for one of the sample, so that large tensors count most. Zeros are never sent: a tensor with
fewer others than its share is expected to send those.
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


class SidcoController(Controller):
    """The number of stages in use.

    Args:
        codec: ``sidco``; its stages are those of the first steps, or one where it counts itself.
        options: of ``sidco``.
    """

    least_sample = 1 << 15

    def __init__(self, codec: Codec, options: Mapping[str, Any]) -> None:
        super().__init__(codec)
        assert isinstance(codec, SIDCoCodec)
        self._every: int = options["every"]
        self._drift: float = options["drift"]
        self._most = most_stages(codec.ratio_kept)
        self._found = np.zeros(2)  # elements that reach the limit, and that should
        self._use(min(codec.stages or 1, self._most))
        self._note(0, self._current, "first")

    def _use(self, stages: int) -> None:
        current = self._variant(stages=stages)
        assert isinstance(current, SIDCoCodec)
        self._current = current

    @property
    def stages(self) -> int:
        """Return their number."""
        return self._current.stages

    def measures(self, step: int) -> bool:
        return step % self._every == 0

    def add(self, name: str, values: Array, share: float) -> None:
        wanted = min(self._current.k(values.size), np.count_nonzero(values))
        if wanted:
            magnitudes = np.abs(values)
            reached = np.count_nonzero(
                (magnitudes >= self._current.limit(flatten(values))) & (magnitudes > 0)
            )
            self._found += np.array([reached, wanted]) / share

    def figures(self, seconds: float) -> Array:
        found, self._found = self._found, np.zeros(2)
        return found

    def decide(self, everyone: Array, step: int) -> bool:
        reached, wanted = everyone.sum(axis=0).tolist()
        if not wanted:
            return False
        part = reached / wanted
        move = -1 if part > 1 + self._drift else 1 if part < 1 - self._drift else 0
        stages = min(max(self.stages + move, 1), self._most)
        if stages == self.stages:
            return False
        self._use(stages)
        self._note(step, self._current, f"{part:.3g} of the share")
        return True

    def current(self, name: str) -> tuple[Codec, str]:
        return self._current, "sidco"

    def state(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def load(self, state: dict[str, Any]) -> None:
        self._use(int(state["stages"]))


def most_stages(ratio: float) -> int:
    """Return how many stages a ratio may take: as many halves as lead to it, at least one, at most the codec's."""
    return min(max(1, math.ceil(math.log(ratio) / math.log(0.5))), MOST_STAGES)
