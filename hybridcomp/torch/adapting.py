"""Adapt the codecs of torch's tensors: make an :class:`.Adaptation` of a policy's rule, and show it gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives.starting import OperationStarter
from hybridcomp.errors import PolicyError
from hybridcomp.policy import Policy
from hybridcomp.policy.adapt.adaptation import Adaptation
from hybridcomp.policy.adapt.decisions import Decision
from hybridcomp.policy.adapt.spec import Adapt
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.torch.memory import Arrays


class Decided(NamedTuple):
    """A decision on the codec of messages.

    Attributes:
        axis, op: mesh axis and operation of the messages.
        step: step of training from which on it holds, as the sender of the messages counts: the number of the average
            where replicas synchronise rarely.
        codec: spec of the codec that carries them.
        name: name of the tensor that it is about; ``""`` for all.
        why: reason, in a few words.
    """

    axis: str
    op: str
    step: int
    codec: str
    name: str
    why: str


class Adapting:
    """The choices of one axis and operation: of the policy, its decider, or its rule's adaptation.

    Args:
        policy: policy of all ranks.
        axis, op: mesh axis and operation of the messages.
        comm: communicator of the ranks.

    Raises:
        PolicyError: decisions are to be written to a file, and other groups decide apart.
    """

    def __init__(self, policy: Policy, axis: str, op: str, comm: OperationStarter[Any]) -> None:
        self.asked: Policy | Decider | Adaptation = comm.decider or policy
        self._axis = axis
        self._op = op
        self._adaptation: Adaptation | None = None
        rule = policy.adapting(axis, op)
        if rule is not None and rule.adapt is not None and comm.size > 1:
            _require_one_group(rule.adapt, axis, op, comm.deciding)
            _made[axis, op] += 1
            self.asked = self._adaptation = Adaptation(
                rule.adapt,
                rule.codecs or (),
                self.asked,
                axis,
                op,
                comm.gather_figures,
                place=_made[axis, op],
                writes=dist.get_rank() == 0,
            )
            _living.add(self)

    def decisions(self) -> list[Decided]:
        """Return the decisions up to now."""
        return [] if self._adaptation is None else self._decided(self._adaptation.history())

    def news(self) -> list[Decided]:
        """Return the decisions made since the last call; loaded ones are no news."""
        return [] if self._adaptation is None else self._decided(self._adaptation.news())

    def _decided(self, history: list[Decision]) -> list[Decided]:
        return [Decided(self._axis, self._op, *decision[:4]) for decision in history]

    @property
    def version(self) -> int:
        """Return a number that grows whenever answers may have changed."""
        return 0 if self._adaptation is None else self._adaptation.version

    def begin(self, step: int) -> bool:
        """Begin a step, before its first message; return whether its messages are to be shown to :meth:`observe`."""
        if self._adaptation is None:
            return False
        self._adaptation.begin(step)
        return self._adaptation.measuring

    def observe(
        self, name: str, values: torch.Tensor, feedback: ErrorFeedback, key: str | None = None
    ) -> None:
        """Show the adaptation the values that a message is about to carry.

        Args:
            name: name of the tensor.
            values: [n], on any device.
            feedback: error feedback that has the residual added to them.
            key: key of the residual; None for ``name``.
        """
        assert self._adaptation is not None
        where = self._adaptation.sample(values.numel())
        seen = values.detach()[where].float().cpu().numpy()
        owed = feedback.owed((self._axis, key or name), values.numel(), where)
        self._adaptation.observe(name, seen if owed is None else seen + owed, values.numel())

    def memory(self) -> Arrays:
        """Return the arrays to save, none where nothing adapts."""
        return {} if self._adaptation is None else self._adaptation.memory()

    def load_memory(self, arrays: Arrays) -> None:
        """Load the arrays that :meth:`memory` returned.

        Raises:
            ValueError: the arrays belong to another adaptation.
        """
        if self._adaptation is not None:
            self._adaptation.load_memory(arrays)


def _require_one_group(adapt: Adapt, axis: str, op: str, size: int) -> None:
    """Check that rank 0 knows all decisions that a file is to have: those that all ranks make together."""
    ranks = dist.get_world_size()
    if adapt.freeze is not None and size < ranks:
        raise PolicyError(
            f"decisions of {axis}.{op} are to be written to {adapt.freeze}, and {size} of {ranks} ranks make them: "
            "other groups decide apart. Write no file (freeze, HYBRIDCOMP_FREEZE), or adapt in a group of all ranks"
        )


_living: weakref.WeakSet[Adapting] = weakref.WeakSet()
_made: Counter[tuple[str, str]] = Counter()  # adaptations of each axis and operation in this process


def decisions() -> list[Decided]:
    """Return the decisions of rules with ``adapt`` in this process, by step; the same on all ranks of a group."""
    return sorted((one for each in list(_living) for one in each.decisions()), key=lambda one: one.step)


def new_decisions() -> list[Decided]:
    """Return those of :func:`decisions` that were made in this process since the last call of this function."""
    return sorted((one for each in list(_living) for one in each.news()), key=lambda one: one.step)
