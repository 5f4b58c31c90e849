"""Define controllers, which decide about a codec from figures of the data: the common part of kinds of ``adapt``."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.codecs import Codec, get_codec
from hybridcomp.policy.adapt.decisions import Decision

Array = npt.NDArray[np.float64]


class Controller(abc.ABC):
    """Controller of the codec of an axis and operation, alike on all ranks.

    In a measured step :meth:`add` sees the values to be encoded. :meth:`figures` are then gathered from all ranks,
    and :meth:`decide` gets them a step later, the same on all ranks.

    Args:
        codec: codec of the rule; the decisions are variants of it.

    Attributes:
        history: decisions up to now.
    """

    least_sample = 1 << 13
    """Fewest elements of a tensor that :meth:`add` is to see, if it has as many."""

    def __init__(self, codec: Codec) -> None:
        self.history: list[Decision] = []
        self._codec = codec

    @abc.abstractmethod
    def measures(self, step: int) -> bool:
        """Tell whether a step is measured: the same on all ranks."""

    @abc.abstractmethod
    def add(self, name: str, values: Array, share: float) -> None:
        """Take notice of a message's values before it is sent.

        Args:
            name: name of the tensor.
            values: float64 [m], some of its elements, with the residual of error feedback added; all finite. None of
                them where one is not: the tensor counts among those shown all the same, so that all ranks' figures
                have one size.
            share: number of elements looked at over the number of its elements.
        """

    @abc.abstractmethod
    def figures(self, seconds: float) -> Array:
        """Return this rank's figures [n] of the measured step, and forget them.

        Args:
            seconds: recent seconds of a step; NaN where they are not known.
        """

    @abc.abstractmethod
    def decide(self, everyone: Array, step: int) -> bool:
        """Decide, from all ranks' figures [ranks, n], the codecs from ``step`` on; return whether they are new."""

    @abc.abstractmethod
    def current(self, name: str) -> tuple[Codec, str]:
        """Return the codec for a tensor now, and the reason, in a few words that do not change from step to step."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that :meth:`load` needs to go on alike, in JSON's types."""

    @abc.abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state that :meth:`state` returned."""

    def _variant(self, **params: Any) -> Codec:
        """Return the rule's codec with other parameters."""
        return get_codec(self._codec.name, **{**self._codec.params, **params})

    def _note(self, step: int, codec: Codec, why: str, name: str = "") -> None:
        self.history.append(Decision(step, codec.spec, name, why))
