"""Search for calls that differ, and shrink them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.mpi4py_differential.calls import Draw
from tests.mpi4py_differential.draws import draws
from tests.mpi4py_differential.pool import Finding, Pool

SHRINKING = 45.0  # seconds for one finding


class _FoundError(Exception):
    """A call differs."""


def shown(found: Finding) -> str:
    """Return a finding for people."""
    brief = {k: v for k, v in found.draw.items() if k not in ("send", "recv") and v not in (None, "", False)}
    return f"--- {found.title}, {found.draw['ranks']} ranks\n{json.dumps(brief)}\n{found.text}"


class Search:
    """Draws on some ranks.

    Args:
        pool: the ranks.
        calls: names of calls.
        policies: those that are tried.
    """

    def __init__(self, pool: Pool, calls: list[str], policies: list[str]) -> None:
        self.pool = pool
        self.draws = 0
        self._calls = calls
        self._policies = policies

    def round(self, number: int, size: int, known: set[str], end: float = float("inf")) -> Iterator[Finding]:
        """Draw calls by a seed; yield each finding of a new kind, shrunk.

        Args:
            number: the seed.
            size: how many calls are drawn.
            known: titles of findings that are passed over; new ones are added.
            end: when to stop, by ``time.monotonic``.
        """
        done = self.draws + size
        part = 0
        while self.draws < done:
            found = self._first(1000 * number + part, done - self.draws, known, end)
            if found is None:
                return
            known.add(found.title)
            part += 1
            yield found

    def _first(self, number: int, size: int, known: set[str], end: float) -> Finding | None:
        """Return the first finding of a new kind among some draws, shrunk."""
        first: list[Finding] = []
        since = [0.0]

        @seed(number)
        @settings(
            max_examples=size,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(draws(self.pool.ranks, self._calls))
        def look(draw: Draw) -> None:
            now = time.monotonic()
            if now > end or (first and now > since[0] + SHRINKING):
                return
            self.draws += not first
            found = self.pool.check(draw, self._policies if not first else [first[0].policy])
            if found is None or found.title in known or (first and found.title != first[0].title):
                return
            if not first:
                since[0] = now
            first[:] = [found]
            raise _FoundError

        try:
            look()
        except _FoundError:
            pass
        except Exception as error:  # a finding that was there once only, which hypothesis calls flaky
            if not first:
                raise
            if "Flaky" not in type(error).__name__:
                raise
        return first[0] if first else None
