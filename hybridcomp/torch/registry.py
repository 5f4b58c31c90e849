"""Register every communicator and hook of this process: their statistics and their error-feedback memory."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridcomp import style, trace, variables
from hybridcomp.collectives import StatRow, merge
from hybridcomp.collectives.report import hint, show
from hybridcomp.collectives.stats import Stats, since
from hybridcomp.launcher import rank_here
from hybridcomp.steps import NO_STEPS, between, clock
from hybridcomp.torch.memory import STEP, Arrays, as_array

_gpu: Any = torch.cuda  # without types


class Member(Protocol):
    """An object with statistics and memory: a process group or a hook's state."""

    @property
    def label(self) -> str:
        """Return the prefix of its keys in a saved state."""

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""

    def memory(self) -> Arrays:
        """Return the arrays to save, by key."""

    def load_memory(self, arrays: Arrays) -> None:
        """Load the arrays that :meth:`memory` returned."""

    def advance(self) -> None:
        """Count a training step that has ended."""


class Registry:
    """A registry of members, in the order in which they came; the same on all ranks of a program.

    It keeps none alive.
    """

    def __init__(self) -> None:
        self._members: dict[str, weakref.ref[Member]] = {}
        self._past: list[StatRow] = []
        self._forgotten: list[StatRow] = []
        self._lock = threading.RLock()  # a member may end, and be removed, wherever memory is allocated
        self._rank = 0
        self._at_exit = False
        self._sees_steps = False
        self._no_steps: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._steps_forgotten = NO_STEPS

    @property
    def rank(self) -> int:
        """Return this process's rank; setting it begins the trace that ``HYBRIDCOMP_TRACE`` asks for."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank
        trace.joined(rank)
        if not self._sees_steps:
            self._sees_steps = True
            register_optimizer_step_post_hook(self._note_step)

    def ignore_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the steps of an optimizer for no steps of training: it works beside another one."""
        self._no_steps.add(optimizer)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step, and have the trace say that it has ended: an optimizer has changed the weights."""
        if optimizer in self._no_steps:
            return
        if not clock.stepped(optimizer, sees_waits=not _gpu.is_initialized()):
            return
        if trace.recorder is not None:
            trace.recorder.step("an optimizer")

    def add(self, member: Member) -> None:
        """Add a member under its label, made unique by a number.

        Raises:
            ConfigError: a variable of hybridcomp has a value that is not allowed.
        """
        variables.check(rank_here())
        with self._lock:
            if not self._at_exit:
                atexit.register(self.print_summary)
                self._at_exit = True
            living = self._living()
            key, count = member.label, 1
            while key in living:
                count += 1
                key = f"{member.label}.{count}"
            self._members[key] = weakref.ref(member)

    def remove(self, member: Member) -> None:
        """Remove a member but keep its statistics."""
        with self._lock:
            for key, known in self._living().items():
                if known is member:
                    self.keep(member.rows())
                    del self._members[key]

    def keep(self, rows: list[StatRow]) -> None:
        """Keep the statistics of a member that is gone."""
        with self._lock:
            self._past = merge([self._past, rows])

    def stats(self) -> Stats:
        """Return all members' statistics since the last reset, past ones too, by axis, operation, codec and reason."""
        with self._lock:
            return Stats(since(self._forgotten, self.total()), between(self._steps_forgotten, clock.totals))

    def reset(self) -> None:
        """Count from nothing again."""
        with self._lock:
            self._forgotten = self.total()
            self._steps_forgotten = clock.totals
            clock.break_off()

    def total(self) -> list[StatRow]:
        """Return statistics of all members since the process began, whatever was reset."""
        with self._lock:
            return merge([self._past, *(m.rows() for m in self._living().values())])

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of all members' memory."""
        return {
            f"{key}/{name}": torch.from_numpy(np.array(array))
            for key, member in self._living().items()
            for name, array in member.memory().items()
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load members' memory; those that the state does not name start from nothing.

        Raises:
            ValueError: the state holds the memory of a member that this process does not have.
        """
        members = self._living()
        parts: dict[str, Arrays] = {key: {} for key in members}
        for key, tensor in state.items():
            owner, _, name = key.partition("/")
            if owner in parts:
                parts[owner][name] = as_array(tensor).copy()
            elif name != STEP:
                raise ValueError(
                    f"the saved state belongs to {owner!r}, which this process has not made; "
                    f"it has {', '.join(members) or 'no process group and no hook'}"
                )
        for key, arrays in parts.items():
            members[key].load_memory(arrays)

    def advance(self) -> None:
        """Notify all members, and the trace, that a training step has ended."""
        trace.step_ended()
        for member in self._living().values():
            member.advance()

    def _living(self) -> dict[str, Member]:
        with self._lock:
            return {key: m for key, ref in list(self._members.items()) if (m := ref()) is not None}

    def print_summary(self) -> None:
        """Print on rank 0 what was and what was not compressed.

        ``HYBRIDCOMP_SUMMARY=1`` says it also if nothing was, ``HYBRIDCOMP_SUMMARY=0`` never. Where nothing was, and
        the policy would have compressed something else, it says that and why.
        """
        wanted = variables.SUMMARY.read()
        if self.rank or wanted is False:
            return
        rows = self.stats()
        if wanted or any(row.codec != "none" for row in rows):
            show(rows, sys.stderr, steps=rows.steps)
        elif told := hint(rows):
            style.say(told, sys.stderr)


registry = Registry()
