"""Keep weights in two versions: one that passes in flight use, and a newer one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridcomp.torch.flat import views


class Versions:
    """Weights of some parameters by version number, in as many flat buffers as there are versions.

    The module's parameters are pointed to the version in use. They are never written to: autograd would take
    the weights that it saved in forward for spoilt. The optimizer has parameters of its own, which share the
    newest version's memory.

    Args:
        parameters: parameters of the module, by name. Their weights now are version 0.
        kept: 2, or 1 where no pass is in flight when a version is made: it then overwrites the one before.

    Attributes:
        newest: number of the newest version.
        leaves: parameters that the optimizer updates, by name.
        kept: as given.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, kept: int) -> None:
        self._parameters = parameters
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self._flat = [flat, *(flat.clone() for _ in range(kept - 1))]
        self._views = [views(buffer, parameters.values()) for buffer in self._flat]
        self._numbers = [0, -1][:kept]  # version that each buffer holds; -1 is before training: equal to 0
        self._used = 0
        self.newest = 0
        self.kept = kept
        self.leaves = {
            name: nn.Parameter(view) for name, view in zip(parameters, self._views[0], strict=True)
        }
        self._point(0)

    def restart(self, step: int) -> None:
        """Number the present versions as those of ``step`` and, if two are kept, of the step before."""
        newest = self._numbers.index(self.newest)
        self._numbers = [step if i == newest else step - 1 for i in range(self.kept)]
        self.newest = step

    def use(self, number: int) -> None:
        """Set the module to compute with a version.

        Raises:
            ValueError: the version is not kept.
        """
        place = self._numbers.index(number)
        if place != self._used:
            self._point(place)

    def use_newest(self) -> None:
        """Set the module to compute with the newest version."""
        self.use(self.newest)

    def begin(self) -> None:
        """Make the next version, as a copy of the newest, for the optimizer to update through ``leaves``.

        Where two are kept it takes the place of the older one, which no pass may need any more.
        """
        if self.kept == 2:
            newest = self._numbers.index(self.newest)
            self._flat[1 - newest].copy_(self._flat[newest])
            for leaf, view in zip(self.leaves.values(), self._views[1 - newest], strict=True):
                leaf.data = view
            self._numbers[1 - newest] = self.newest + 1
        else:
            self._numbers[0] += 1
        self.newest += 1

    def take_gradients(self) -> None:
        """Move the gradients from the module's parameters to the leaves."""
        for name, parameter in self._parameters.items():
            self.leaves[name].grad, parameter.grad = parameter.grad, None

    def older(self) -> dict[str, Tensor]:
        """Return the flat weights of the version before the newest, if it is kept, for a checkpoint."""
        newest = self._numbers.index(self.newest)
        return {"older": self._flat[1 - newest]} if self.kept == 2 else {}

    def _point(self, place: int) -> None:
        for parameter, view in zip(self._parameters.values(), self._views[place], strict=True):
            parameter.data = view
        self._used = place
