"""Average the gradients of torchft's replicas by name, with error feedback that follows what was committed."""

# torch reads the hook's annotations as objects: no `from __future__ import annotations` here.

from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torchft import ddp as theirs  # type: ignore[import-untyped]
from torchft.manager import Manager  # type: ignore[import-untyped]

from hybridcomp.torch.flat import real_shape
from hybridcomp.torch.hook.averager import parameter_names
from hybridcomp.torch.torchft.committed import CommittedAverages


class DistributedDataParallel(theirs.DistributedDataParallel):  # type: ignore[misc]
    """torchft's DDP, whose gradients a policy compresses, with error feedback by parameter.

    Feedback follows what is committed, as :class:`.CommittedAverages` says. Replicas have the same bits after each step
    that they commit.
    """

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        """Wrap a module, as torchft's class does.

        Args:
            manager: manager, whose process group is one of :mod:`hybridcomp.torch.torchft`.
            module: module to train.
            kwargs: torch's arguments.

        Raises:
            ConfigError: the manager's process group is another one.
        """
        self._hybridcomp = ReplicaGradients(manager)
        super().__init__(manager, module, **kwargs)
        self._hybridcomp.names = parameter_names(self)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a hook; torchft's own, which this constructor gives, is replaced by the one that compresses."""
        if state is self._hybridcomp.manager:
            state, hook = self._hybridcomp, ReplicaGradients.submit
        super().register_comm_hook(state, hook)


class ReplicaGradients(CommittedAverages):
    """The state of the hook: averages of a module's gradients.

    Attributes:
        names: names of the module's parameters, by ``id``.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager)
        self.names: dict[int, str] = {}

    def submit(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket over the replicas that participate."""
        if bucket.index() == 0:
            self.begin()
        parameters = bucket.parameters()
        named = [(self.names[id(parameter)], real_shape(parameter)) for parameter in parameters]
        return self.mean(bucket.buffer(), named, tuple(map(id, parameters)), last=bucket.is_last())
