"""Hold what a hook keeps from one step to the next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from hybridcomp.codecs import ErrorFeedback
from hybridcomp.device import Runtime
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.links import Link
from hybridcomp.torch.hook.summing import Buffers

if TYPE_CHECKING:
    from hybridcomp.torch.hook.device_staging import HookDevice

_TRANSFERS = 64  # that a batch may have: more than any codec's rounds need


class HookContext:
    """The state that a hook has from one step to the next, and the link to the other ranks; for one thread.

    Attributes:
        axis: the policy's section, part of the memory's keys.
        link: to the other ranks.
        feedback: residuals by (axis, parameter).
        factors: PowerSGD's Q by parameter.
        counts: statistics.
        buffers: for messages of what is in host memory.
    """

    def __init__(
        self,
        axis: str,
        link: Link,
        feedback: ErrorFeedback,
        factors: dict[str, npt.NDArray[Any]],
        counts: Counts,
    ) -> None:
        self.axis, self.link = axis, link
        self.feedback, self.factors, self.counts = feedback, factors, counts
        self.buffers = Buffers()
        self._batches = itertools.count()
        self._devices: dict[int, HookDevice] = {}

    def device(self, runtime: Runtime) -> HookDevice:
        """Return a device's streams and its buffers for messages in device memory."""
        from hybridcomp.torch.hook.device_staging import HookDevice  # noqa: PLC0415  (only who has device arrays pays for it)

        found = self._devices.get(id(runtime))
        if found is None:
            found = self._devices[id(runtime)] = HookDevice(runtime)
        return found

    def numbers(self) -> Iterator[int]:
        """Return the numbers of the next batch's transfers; the same on all ranks, which have the same batches."""
        first = next(self._batches) * _TRANSFERS
        return iter(range(first, first + _TRANSFERS))
