"""Synchronise the fragments of a model, each at its own steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridcomp.codecs import checks
from hybridcomp.torch.hook.averager import Averager
from hybridcomp.torch.registry import registry
from hybridcomp.torch.sync.cutting import Parameters
from hybridcomp.torch.sync.fragment import Fragment

MakeOuter = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
Order = Literal["torchft", "paper"]
ORDERS = ("torchft", "paper")


class Synchronizer:
    """A synchroniser of this replica's parameters with those of all others.

    Fragment i of F has an outer step after ``every * (i + 1) // F`` inner steps, and every ``every`` after that. In the
    order ``paper``, that of streaming DiLoCo (Douillard et al., arXiv 2501.18512), it starts then and ends ``delay``
    inner steps later; in the order ``torchft`` it ends then, and started ``delay`` inner steps before. All replicas
    take the same inner steps.

    Attributes:
        step: number of inner steps taken.
        fragments: fragments in order.
        globals: values of which all replicas have the same bits, by parameters' names.
        outer: the optimizer of the global values.
        weight: weight of this replica in outer steps that start; those of all replicas have the mean 1.
    """

    def __init__(
        self,
        fragments: Sequence[Parameters],
        averager: Averager,
        make_outer: MakeOuter,
        *,
        every: int,
        delay: int = 0,
        alpha: float = 0.0,
        order: Order = "paper",
    ) -> None:
        """Begin with the parameters as they are, the same on all replicas.

        Args:
            fragments: parameters of each fragment, by name.
            averager: averager of the replicas.
            make_outer: function that makes the outer optimizer of the global values.
            every: inner steps from one outer step of a fragment to its next.
            delay: inner steps from an outer step's start to its end.
            alpha: the share that a replica keeps of its own values, where it takes the global ones.
            order: whether an outer step is due when it ends (``torchft``) or when it starts (``paper``).

        Raises:
            ValueError: a number is out of its range; says which it has.
        """
        check_schedule(every, len(fragments), delay, alpha, order)
        self.step = 0
        self.weight = 1.0
        self.fragments = [Fragment(i, parameters, averager) for i, parameters in enumerate(fragments)]
        self.globals = {name: p for fragment in self.fragments for name, p in fragment.globals.items()}
        self.outer = make_outer(self.globals)
        registry.ignore_steps_of(self.outer)
        self._every, self._delay, self._alpha = every, delay, alpha
        # Inner steps from an outer step's start to when it is due.
        self._ahead = delay if order == "torchft" else 0
        self._averager = averager  # the registry keeps none alive

    def advance(self) -> None:
        """Count an inner step, start the outer steps that are due after it, and then end those that are due.

        Raises:
            CollectiveTimeoutError: a replica did not come in time; parameters are as they were.
            HybridcompError: an average failed, here or on another replica.
        """
        self.step += 1
        for fragment in self.fragments:
            if self._since_start(fragment) == 0:
                fragment.start(self._rounds(fragment), self.weight)
        for fragment in self.fragments:
            if fragment.under_way and self._since_start(fragment) == self._delay:
                fragment.update(self.outer, self._alpha)

    @property
    def met(self) -> bool:
        """Tell whether an outer step has ended after the last inner step: replicas have waited for each other."""
        return any(self._since_start(fragment) == self._delay for fragment in self.fragments)

    def leave(self) -> None:
        """End the outer steps under way, or only wait for their averages where these are not due before later steps."""
        if self._ahead:
            self.arrived()
        else:
            self.finish()

    def finish(self) -> None:
        """End the outer steps that are under way, before they are due."""
        for fragment in self.fragments:
            if fragment.under_way:
                fragment.update(self.outer, self._alpha)

    def average(self, *, untouched: bool = False) -> None:
        """Average all parameters over the replicas now, without the outer optimizer, whose momentum stays as it is.

        All replicas then have the global values, and the same bits. Outer steps under way are ended before. Collective.

        Args:
            untouched: whether nothing has changed a parameter on any replica since the last inner step was counted: a
                fragment that was given the global values after it then stays as it is.

        Raises:
            HybridcompError: see :meth:`advance`.
        """
        alike = [
            untouched and not self._alpha and self._since_start(fragment) == self._delay
            for fragment in self.fragments
        ]
        self.finish()
        apart = [fragment for fragment, same in zip(self.fragments, alike, strict=True) if not same]
        for fragment in apart:
            fragment.start(self._rounds(fragment), self.weight)
        for fragment in apart:
            fragment.replace()

    def agree(self) -> None:
        """Take the parameters as they are, the same on all replicas, for the global values."""
        for fragment in self.fragments:
            fragment.agree()

    # -- state ---------------------------------------------------------------------------------------

    def arrived(self) -> dict[str, Tensor]:
        """Wait for the outer gradients that are under way; return them by name, as they are kept until they are due."""
        found: dict[str, Tensor] = {}
        for fragment in self.fragments:
            fragment.arrive()
            if fragment.under_way:
                found |= fragment.differences
        return found

    def resume(self, step: int, under_way: Sequence[bool]) -> None:
        """Go on after so many inner steps, with global values, outer state and outer gradients that are here.

        Args:
            step: number of inner steps taken.
            under_way: whether the outer gradient of each fragment is here and its update is to come.

        Raises:
            ValueError: an update is never due.
        """
        self.step = step
        for fragment, waits in zip(self.fragments, under_way, strict=True):
            since = self._since_start(fragment)
            if waits and (since is None or since >= self._delay):
                raise ValueError(
                    f"after step {step} the saved state has an outer step of fragment {fragment.number} under way, "
                    "which this has not: every, fragments, fragment_sync_delay and its order must be as they were"
                )
            fragment.under_way = waits

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the step, the global values, the outer optimizer's state, and outer gradients under way."""
        return {
            "step": self.step,
            "globals": _copies(self.globals.items()),
            "outer": copy.deepcopy(self.outer.state_dict()),
            "arrived": _copies(self.arrived().items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that :meth:`state_dict` returned; wait for averages under way, and drop them.

        Raises:
            ValueError: the state is of other parameters, or of a schedule whose outer steps under way this has not.
        """
        _check_names("global values", state["globals"], self.globals)
        arrived = state["arrived"]
        under_way = [not fragment.differences.keys().isdisjoint(arrived) for fragment in self.fragments]
        waiting = [fragment for fragment, waits in zip(self.fragments, under_way, strict=True) if waits]
        expected = {name: tensor for fragment in waiting for name, tensor in fragment.differences.items()}
        _check_names("outer gradients under way", arrived, expected)
        for fragment in self.fragments:
            fragment.drop()
        self.resume(int(state["step"]), under_way)
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))
        with torch.no_grad():
            for name, value in self.globals.items():
                value.copy_(state["globals"][name])
            for name, difference in expected.items():
                difference.copy_(arrived[name])

    # -- the schedule --------------------------------------------------------------------------------

    def _since_start(self, fragment: Fragment) -> int | None:
        """Return the inner steps since a fragment's last start was due; None before its first one."""
        first = self._first(fragment)
        return None if self.step < first else (self.step - first) % self._every

    def _rounds(self, fragment: Fragment) -> int:
        """Return how many outer steps of a fragment came before the newest."""
        return max(0, self.step - self._first(fragment)) // self._every

    def _first(self, fragment: Fragment) -> int:
        """Return the inner step after which a fragment's first outer step starts."""
        return self._every * (fragment.number + 1) // len(self.fragments) - self._ahead


def check_schedule(every: int, fragments: int, delay: int, alpha: float, order: str = "paper") -> None:
    """Check the numbers of a schedule.

    Raises:
        ValueError: one is out of its range, or counts steps and is no integer; says which it has.
    """
    for name, value, allowed in (
        ("every", every, "at least 1"),
        ("fragment_sync_delay", delay, "from 0 and below every"),
    ):
        if not checks.is_integer(value):
            raise ValueError(f"{name} must be an integer, {allowed}, not {value!r}")
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    if not 1 <= fragments <= every:
        raise ValueError(f"fragments must be from 1 to every ({every}), not {fragments}")
    if not 0 <= delay < every:
        raise ValueError(
            f"fragment_sync_delay must be from 0 and below every ({every}), not {delay}: a fragment's outer step ends "
            "before its next one starts"
        )
    if order not in ORDERS:
        raise ValueError(f"fragment_sync_order must be one of {', '.join(ORDERS)}, not {order!r}")
    if order == "torchft" and delay >= every // fragments:
        raise ValueError(
            f"fragment_sync_delay must be from 0 and below every / fragments ({every // fragments}), not {delay}: the "
            "first fragment's differences are taken so many steps before it is due; fragment_sync_order='paper' allows "
            "all below every"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"fragment_update_alpha must be from 0 to 1, not {alpha}")


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors}


def _check_names(what: str, saved: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    for name in [*mine, *saved]:
        there, here = (tuple(t[name].shape) if name in t else None for t in (saved, mine))
        if there != here:
            shapes = [f"has {'none' if shape is None else list(shape)}" for shape in (there, here)]
            raise ValueError(
                f"{what}: of {name} the saved state {shapes[0]}, and this {shapes[1]}: the model must be as it was, "
                "and where outer steps are under way the fragments, too"
            )
