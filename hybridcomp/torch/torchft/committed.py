"""Average named tensors over torchft's replicas, with error feedback that follows what was committed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.futures import Future
from torchft.manager import Manager  # type: ignore[import-untyped]

from hybridcomp.errors import ConfigError
from hybridcomp.torch.hook.averager import Named, done
from hybridcomp.torch.memory import Arrays
from hybridcomp.torch.torchft.groups import ReplicaAverager, Replicas


class CommittedAverages(ReplicaAverager):
    """The averager of a module's tensors over the replicas of each quorum.

    A step that is not committed leaves the feedback as it was before. Replicas that stay keep theirs from quorum to
    quorum, that of a replica which has left is lost with it, and one that joins or recovers begins with none. Warm-up
    counts the steps that were committed.

    Attributes:
        manager: torchft's manager.
    """

    def __init__(self, manager: Manager) -> None:
        """Average for a manager, whose process group is one of :mod:`hybridcomp.torch.torchft`.

        Raises:
            ConfigError: the manager's process group is another one.
        """
        group = manager._pg
        if not isinstance(group, Replicas):
            raise ConfigError(
                f"the manager's process group must be a ProcessGroupGloo or ProcessGroupNCCL of "
                f"hybridcomp.torch.torchft, not {type(group).__module__}.{type(group).__name__}"
            )
        super().__init__(group, group.policy, axis=group.axis, remembers=True)
        self.manager = manager
        self._before: Arrays = {}  # residuals before the step
        self._began: int | None = None  # the manager's number of the step that began last
        manager.register_state_dict_fn("hybridcomp", self._load, self._state)

    def begin(self) -> None:
        """Begin a step over the quorum's replicas, with the feedback of the last step that was committed.

        Raises:
            MismatchError: this replica may not take part; see :class:`.Replicas`.
        """
        manager = self.manager
        manager.wait_quorum()
        if self._replicas.refused is not None:
            raise self._replicas.refused
        # Replicas of a quorum agree on this number: one that recovers in this step, and one that met an error, too.
        self.step = manager.current_step()
        undone = self.step == self._began
        self._began = self.step
        if not self.follow_quorum(self._before if undone else None) and undone:
            self.feedback.load_state_dict(self._before)
        if not manager.is_participating():
            self.feedback.load_state_dict({})  # of gradients at weights that the others have left
        self._before = self.feedback.state_dict()

    def mean(self, buffer: torch.Tensor, named: Named, key: Hashable, *, last: bool) -> Future[torch.Tensor]:
        """Average a buffer over the replicas that participate, in place; an error has the manager commit nothing.

        Args:
            buffer: 1-D floating-point tensor: tensors one after another.
            named: their names and shapes.
            key: key that buffers of the same tensors share.
            last: whether it is the step's last buffer.
        """
        manager = self.manager
        if manager.errored() is not None:
            return done(buffer)
        try:
            if not manager.is_participating():
                buffer.zero_()
            averaging = self.average(buffer, lambda: named, key, self.step)
            if last:
                self.flush()
        except Exception as error:
            manager.report_error(error)
            return done(buffer)
        future = done(buffer) if averaging is None else averaging.future
        ranks, participants = self._joined().size(), manager.num_participants()
        if ranks != participants:
            future = future.then(lambda average: average.value().mul_(ranks / participants))
        told: Future[torch.Tensor] = manager.wrap_future(future, buffer)
        return told

    def means(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Future[torch.Tensor]]:
        """Begin a step that averages tensors, contiguous ones, by their names, in place; return the futures of all."""
        self.begin()
        return [
            self.mean(tensor.view(-1), [(name, tuple(tensor.shape))], name, last=number == len(tensors))
            for number, (name, tensor) in enumerate(tensors, 1)
        ]

    # -- live recovery -------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return what a replica that recovers takes over: not the residuals, which are each replica's own."""
        return {}

    def _load(self, state: dict[str, Any]) -> None:
        self._before, self._began = {}, None
        self.feedback.load_state_dict({})
