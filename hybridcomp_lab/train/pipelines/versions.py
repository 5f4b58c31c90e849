"""Keep weights in two versions: one that passes in flight use, and a newer one.

Passes whose gradients are applied a step late can use predicted weights in the place of older ones. The prediction is
the last update once more, ``2 W(t) - W(t-1)`` for version t: SpecTrain's (Chen, Yang, Cheng 2018, arXiv 1809.02839),
which takes the optimizer's momentum as the update to come; of AdamW it is XPipe's (Guan et al. 2019,
arXiv 1911.04610), with the decay.
"""

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

    A version is made by :meth:`begin`, updates through ``leaves``, and :meth:`end`.

    Args:
        parameters: parameters of the module, by name. Their weights now are version 0.
        kept: 2, or 1 where no pass is in flight when a version is made: it then overwrites the one before.
        predict: whether passes that use a version compute with the prediction of the next one; for two kept ones,
            which then hold predictions beside the newest weights.

    Attributes:
        newest: number of the newest version.
        leaves: parameters that the optimizer updates, by name.
        held: number of buffers.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, kept: int, predict: bool = False) -> None:
        assert kept == 2 or not predict, "a version that is used while it is the newest needs no prediction"
        self._parameters = parameters
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self._flat = [flat, *(flat.clone() for _ in range(kept - 1))]
        self._weights = flat.clone() if predict else None  # the newest, where the others are predictions
        self._views = [views(buffer, parameters.values()) for buffer in self._flat]
        self._numbers = [0, -1][:kept]  # version that each buffer holds; -1 is before training: equal to 0
        self._used: int | None = 0
        self.newest = 0
        self.held = kept + predict
        newest = self._views[0] if self._weights is None else views(self._weights, parameters.values())
        self.leaves = {name: nn.Parameter(view) for name, view in zip(parameters, newest, strict=True)}
        self._point(0)

    def restart(self, step: int) -> None:
        """Number the present versions as those of ``step`` and, if two are kept, of the step before."""
        newest = self._numbers.index(self.newest)
        self._numbers = [step if i == newest else step - 1 for i in range(len(self._flat))]
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
        """Set the module to compute with the newest weights, until it is set to a version."""
        if self._weights is None:
            self.use(self.newest)
        else:
            self._point(None)

    def begin(self) -> None:
        """Begin the next version, as a copy of the newest, for the optimizer to update through ``leaves``.

        Where two are kept it takes the place of the older one, which no pass may need any more.
        """
        newest = self._numbers.index(self.newest)
        self.newest += 1
        next_one = len(self._flat) - 1 - newest
        self._numbers[next_one] = self.newest
        if self._weights is not None:
            self._flat[next_one].copy_(self._weights)
        elif next_one != newest:
            self._flat[next_one].copy_(self._flat[newest])
            for leaf, view in zip(self.leaves.values(), self._views[next_one], strict=True):
                leaf.data = view

    def end(self) -> None:
        """End the next version, after the optimizer's updates: predict the one after it, if asked for."""
        if self._weights is not None:
            before = self._flat[self._numbers.index(self.newest)]
            torch.sub(self._weights, before, out=before).add_(self._weights)

    def take_gradients(self) -> None:
        """Move the gradients from the module's parameters to the leaves."""
        for name, parameter in self._parameters.items():
            self.leaves[name].grad, parameter.grad = parameter.grad, None

    def state(self) -> dict[str, Tensor]:
        """Return the flat weights that passes will use and the leaves do not have, for a checkpoint."""
        if len(self._flat) == 1:
            return {}
        newest = self._numbers.index(self.newest)
        predicted = {} if self._weights is None else {"predicted": self._flat[newest]}
        return {"older": self._flat[1 - newest], **predicted}

    def _point(self, place: int | None) -> None:
        """Point the parameters to the buffer at a place; None: to the leaves' weights."""
        weights = [leaf.data for leaf in self.leaves.values()] if place is None else self._views[place]
        for parameter, one in zip(self._parameters.values(), weights, strict=True):
            parameter.data = one
        self._used = place
