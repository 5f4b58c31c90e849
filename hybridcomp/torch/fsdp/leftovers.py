"""Keep the error-feedback state of spans that changed their owner: see :func:`.resharding.release`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import torch

from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.codecs.feedback.resharding import release
from hybridcomp.torch.fsdp.segments import Cut, Segment
from hybridcomp.torch.memory import Arrays

Array = npt.NDArray[Any]


class Leftovers:
    """Residuals of a loaded state that this rank adds to the next sum of its part."""

    def __init__(self) -> None:
        self._missing: dict[str, Array] = {}  # by a segment's key
        self._before: dict[str, Arrays] = {}  # the state that they are part of

    def take(self, state: Arrays, axis: str, segments: Iterable[Segment], rank: int) -> Arrays:
        """Remove the leftovers from a state of error feedback; return the rest."""
        rest = dict(state)
        for segment in segments:
            key: Key = (axis, segment.key)
            found = release(state, key, segment.span(rank))
            if found is not None:
                arrays, self._missing[segment.key] = found
                self._before[segment.key] = {name: state[name] for name in arrays}
                rest |= arrays
        return rest

    def add(self, output: torch.Tensor, cut: Cut, ranks: int) -> None:
        """Add the leftovers to a reduced part, once.

        Args:
            output: the part.
            cut: cut of the part.
            ranks: divisor of sums.
        """
        if not self._missing:
            return
        for segment, _ in cut.encoded:
            missing = self._missing.pop(segment.key, None)
            self._before.pop(segment.key, None)
            if missing is not None:
                values = torch.from_numpy(missing / ranks).to(output.device)
                output[segment.start : segment.start + values.numel()] += values

    def put_back(self, state: Arrays) -> Arrays:
        """Return the state of error feedback, to be saved, with the spans that are not added yet."""
        for arrays in self._before.values():
            state |= {name: array.copy() for name, array in arrays.items()}
        return state

    def clear(self) -> None:
        """Drop the leftovers."""
        self._missing.clear()
        self._before.clear()
