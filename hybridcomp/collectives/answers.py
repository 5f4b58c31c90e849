"""Keep the results of a policy's choices until ``auto``, or a rule that adapts, decides anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from hybridcomp.collectives.starting import OperationStarter


class Answer(Protocol):
    """Result of a policy's choices."""

    @property
    def once(self) -> bool:
        """Tell whether a choice is for this time only."""


Made = TypeVar("Made", bound=Answer)


class Answers(Generic[Made]):
    """Cache of the results of one communicator's choices, by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Made] = {}
        self._versions: tuple[int | None, int] = None, 0  # versions of the decisions behind the results

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(
        self, comm: OperationStarter[Any], key: Hashable, make: Callable[[], Made], *, adapted: int = 0
    ) -> Made:
        """Return the result for a key, or make it; ``auto`` reviews its decisions first, if that is due.

        Args:
            comm: communicator that chooses.
            key: key of the result, equal wherever the choices are as long as no decision changes.
            make: function that asks for the choices and makes the result.
            adapted: version of the decisions of a rule that adapts; results of earlier ones are dropped.
        """
        comm.review()
        versions = None if comm.decider is None else comm.decider.version, adapted
        if versions != self._versions:
            self._versions = versions
            self._known.clear()
        found = self._known.get(key)
        if found is None:
            found = make()
            if not found.once:
                self._known[key] = found
        return found
