"""Have torchft's replicas meet rarely: LocalSGD and DiLoCo, whose differences a policy compresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchft import local_sgd as theirs  # type: ignore[import-untyped]
from torchft.manager import Manager  # type: ignore[import-untyped]

from hybridcomp.torch.torchft.committed import CommittedAverages
from hybridcomp.torch.torchft.groups import AveragingWork


class LocalSGD(theirs.LocalSGD):  # type: ignore[misc]
    """torchft's LocalSGD, which averages what parameters have changed by since the last average, not parameters.

    A policy compresses the differences by the parameters' names, with error feedback that follows what was committed.
    It takes as much memory again as the parameters.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
    ) -> None:
        """Wrap a module, as torchft's class does.

        Args:
            manager: manager, whose process group is one of :mod:`hybridcomp.torch.torchft`.
            model: module to train, alike on all replicas.
            optimizer: optimizer of its parameters.
            sync_every: steps from average to average.

        Raises:
            ConfigError: the manager's process group is another one.
        """
        super().__init__(manager, model, optimizer, sync_every)
        self._averages = CommittedAverages(manager)
        self._averaged = {name: _local(p).clone() for name, p in model.named_parameters()}
        manager.register_state_dict_fn("hybridcomp_local_sgd", self._load, lambda: dict(self._averaged))

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        for name, values in self._averaged.items():
            values.copy_(state[name])

    @torch.no_grad()
    def _perform_sync(self) -> None:
        differences = {
            name: _local(p).sub(self._averaged[name]).contiguous()
            for name, p in self._model.named_parameters()
        }
        for future in self._averages.means(list(differences.items())):
            future.wait()
        if self._manager.should_commit():  # which gives a replica that recovers the others' last average
            for name, p in self._model.named_parameters():
                _local(p).copy_(self._averaged[name].add_(differences[name]))


class DiLoCo(theirs.DiLoCo):  # type: ignore[misc]
    """torchft's DiLoCo, whose differences a policy compresses by the parameters' names, with error feedback.

    Feedback follows what is committed.
    """

    def __init__(self, manager: Manager, model_fragments: list[nn.Module], *args: Any, **kwargs: Any) -> None:
        """Wrap fragments of a module, as torchft's class does.

        Args:
            manager: manager, whose process group is one of :mod:`hybridcomp.torch.torchft`.
            model_fragments: parts of the module that meet in turn.
            args, kwargs: torchft's arguments; its buckets and its quantization have no effect.

        Raises:
            ConfigError: the manager's process group is another one.
        """
        super().__init__(manager, model_fragments, *args, **kwargs)
        averages = CommittedAverages(manager)
        for number, fragment in enumerate(self._fragments):
            fragment._average_grads = _Differences(averages, fragment, f"fragments.{number}").start


class _Differences:
    """The differences of a fragment of DiLoCo's, in place of its own all-reduces."""

    def __init__(self, averages: CommittedAverages, fragment: Any, name: str) -> None:
        self._averages, self._fragment, self._name = averages, fragment, name

    def start(self) -> None:
        """Start to average them."""
        differences = self._fragment._grads
        for name, values in differences.items():
            differences[name] = values.contiguous()
        futures = self._averages.means(
            [(f"{self._name}.{name}", values) for name, values in differences.items()]
        )
        self._fragment._allreduce_work += [
            AveragingWork(future, values, 1)
            for future, values in zip(futures, differences.values(), strict=True)
        ]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's values on this rank, which its data shares."""
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else data
