"""Repeat decisions of an earlier job: ``frozen``."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridcomp.codecs import Codec, get_codec
from hybridcomp.policy.adapt.controller import Array, Controller
from hybridcomp.policy.adapt.decisions import Decision


class FrozenController(Controller):
    """Controller of ``frozen``: decisions, and how many of them are in effect.

    Args:
        codec: codec of the steps before the first decision.
        decisions: decisions in the order of their steps.
    """

    def __init__(self, codec: Codec, decisions: Sequence[Decision]) -> None:
        super().__init__(codec)
        self._decisions = sorted(decisions)
        self._done = 0
        self._codecs: dict[str, Codec] = {}

    def measures(self, step: int) -> bool:
        return False

    def add(self, name: str, values: Array, share: float) -> None:
        """Take no notice: nothing is measured."""

    def figures(self, seconds: float) -> Array:
        return np.empty(0)

    def decide(self, everyone: Array, step: int) -> bool:
        done = bisect.bisect_right(self._decisions, step, key=lambda decision: decision.step)
        for decision in self._decisions[self._done : done]:
            self._codecs[decision.name] = get_codec(decision.codec)
        changed, self._done = done != self._done, done
        if changed:  # a loaded history has some of them
            self.history[:] = self._decisions[:done]
        return changed

    def current(self, name: str) -> tuple[Codec, str]:
        found = self._codecs.get(name) or self._codecs.get("")
        return (self._codec, "frozen: before the first decision") if found is None else (found, "frozen")

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Do nothing: the step says which decisions are in effect."""
