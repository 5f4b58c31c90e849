"""Train replicas apart within a context, and synchronise them after some steps of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hybridcomp.policy import Policy, load_policy
from hybridcomp.policy.momentum import check_differences
from hybridcomp.torch.backend.options import PolicyLike, chosen_policy
from hybridcomp.torch.hook.averager import Averager
from hybridcomp.torch.replicas import copy_from_first
from hybridcomp.torch.sync.cutting import cut
from hybridcomp.torch.sync.synchronizer import MakeOuter, Order, Synchronizer

_DEFAULT = "hybrid"  # 4 bits with error feedback on dp


class SemiSync:
    """A context manager in which replicas train apart: the base class of :class:`.LocalSGD` and :class:`.DiLoCo`.

    Within it a post hook of the optimizer's ``step`` counts steps and synchronises the fragments that are due, which
    raises its errors from there. It may be entered again: counts go on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        make_outer: MakeOuter,
        *,
        every: int,
        fragments: int | Sequence[nn.Module] = 1,
        delay: int = 0,
        alpha: float = 0.0,
        order: Order = "paper",
        policy: PolicyLike | None = None,
        process_group: Any = None,
        axis: str = "dp",
        init_sync: bool = True,
    ) -> None:
        """Copy the model's parameters.

        Raises:
            ValueError: a number is out of its range, or fragments do not cover the model; says which.
            PolicyError: the policy cannot be read, or has feedback with momentum.
        """
        chosen = _policy_of(policy)
        check_differences(chosen, axis)
        averager = Averager(chosen, kind="sync", axis=axis, group=process_group)
        parts = cut(model, fragments)
        self._sync = Synchronizer(
            parts, averager, make_outer, every=every, delay=delay, alpha=alpha, order=order
        )
        self._model = model
        self._optimizer = optimizer
        self._found: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._group = process_group
        self._agreed = not init_sync
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        """Begin to count steps; the first time give all replicas rank 0's parameters and buffers, unless told not to.

        Raises:
            RuntimeError: it has been entered, and not left.
        """
        if self._hook is not None:
            raise RuntimeError(f"this {type(self).__name__} has been entered already")
        if not self._agreed:
            copy_from_first([*self._model.parameters(), *self._model.buffers()], self._group)
            self._sync.agree()
            self._agreed = True
        if self._optimizer is None:
            self._hook = register_optimizer_step_post_hook(self._stepped_somewhere)
        else:
            self._hook = self._optimizer.register_step_post_hook(self._stepped)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Count no further steps; end the outer steps under way, unless an exception ends the context.

        In the order ``torchft`` their averages are waited for and kept: they are due after later steps, of a context
        that is entered again.
        """
        assert self._hook is not None
        self._hook.remove()
        self._hook = None
        if error is None:
            self._sync.leave()

    def average(self) -> None:
        """Average all parameters over the replicas now, for instance to save one model. Collective.

        All replicas then have the same bits. No outer optimizer has a part in it.

        Raises:
            RuntimeError: replicas are to begin with rank 0's parameters, and have not begun.
            CollectiveTimeoutError: a replica did not come in time.
            HybridcompError: the average failed, here or on another replica.
        """
        if not self._agreed:  # what is averaged is how parameters differ from what all have agreed on
            raise RuntimeError(
                f"average() of this {type(self).__name__} comes before its first with, which gives all replicas rank "
                "0's parameters: enter it, or make it with init_sync=False where they are alike already"
            )
        self._sync.average()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the counts, the global values, and the outer steps under way.

        It waits for averages under way: all replicas save after the same step. Each saves its own model and optimizer
        beside it, as replicas differ between outer steps, and :func:`hybridcomp.torch.state_dict`, which has the memory
        of error feedback.
        """
        return self._sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that :meth:`state_dict` returned; training goes on with the same bits.

        It waits for averages under way, and drops them. They change the memory of error feedback until then: load that
        afterwards.

        Raises:
            ValueError: the state is of another model, or of a schedule whose outer steps under way this has not.
        """
        self._sync.load_state_dict(state)
        self._agreed = True

    def _stepped(self, *_: object) -> None:
        self._sync.advance()

    def _stepped_somewhere(self, optimizer: Optimizer, *_: object) -> None:
        """Count the step of an optimizer, if it is the model's.

        Raises:
            ValueError: the model has several optimizers.
        """
        if optimizer not in self._found:
            ours = {id(parameter) for parameter in self._model.parameters()}
            has = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
            if has and any(self._found.values()):
                raise ValueError(
                    "several optimizers have parameters of the model: give optimizer= the one that steps last"
                )
            self._found[optimizer] = has
        if self._found[optimizer]:
            self._sync.advance()


def _policy_of(policy: PolicyLike | None) -> Policy:
    return load_policy(policy) if policy is not None else chosen_policy() or load_policy(_DEFAULT)
