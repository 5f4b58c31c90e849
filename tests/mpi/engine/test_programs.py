"""Random programs of operations that overlap, on communicators that overlap, checked against NumPy.

All ranks draw the same program: hypothesis is derandomized, nothing depends on time, and a failure on one rank is one
on all. ``HC_EXAMPLES=500`` runs more of them; ``HC_SEED`` draws others.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import hybridcomp as hc
from hybridcomp.policy.toml import parse_policy
from tests.mpi.conftest import WORLD, of_any_size
from tests.mpi.engine.programs import CODECS, FOLDS, Draw, Flight, Group, start
from tests.mpi.hosts import Hosts

SECONDS = 30.0  # seconds that any operation may take
EXAMPLES = int(os.environ.get("HC_EXAMPLES", "12"))
SEED = int(os.environ.get("HC_SEED", "0"))
SIZES = [0, 1, 2, 3, 63, 65, 128, 1001, 4097, 20_011, 70_001]
OPS = [
    *["all_reduce"] * 4,
    *["broadcast"] * 2,
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "all_to_all_v",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "shift",
    "shift",
]
THEN = ["go on", "go on", "go on", "wait for it", "look", "wait for all"]
draws = st.builds(
    Draw,
    op=st.sampled_from(OPS),
    n=st.sampled_from(SIZES) | st.integers(0, 3000),
    dtype=st.sampled_from(["float32", "float32", "float64", "float16", "int32", "int64", "uint8"]),
    codec=st.sampled_from([None, *CODECS]),
    fold=st.sampled_from(["sum", *FOLDS]),
    place=st.sampled_from(["apart", "in place", "overlapping"]),
    root=st.integers(0, 7),
    way=st.integers(0, 11),
    name=st.sampled_from([None, "a.weight", "b.weight"]),
    seed=st.integers(0, 1 << 20),
)
FEEDBACK = '[dp]\nall_reduce = { codec = "int4:block=128", feedback = "ef" }\n'


def groups() -> list[Group]:
    """Return communicators over all ranks and over some."""
    size, me = WORLD.size, WORLD.rank
    everyone = list(range(size))

    def make(comm: Any, policy: Any = "none") -> hc.Communicator:
        return hc.Communicator(comm, of_any_size(policy), "dp", timeout=SECONDS)

    world = make(WORLD)
    parity = WORLD.Split(me % 2, me)
    few = max(1, size - 1)
    first = WORLD.Split(0 if me < few else 1, me)
    backwards = WORLD.Split(0, -me)
    return [
        Group("world", world, everyone),
        Group("its duplicate", world.Dup(), everyone),
        Group("int8", make(WORLD, "int8"), everyone),
        Group("feedback", make(WORLD, parse_policy(FEEDBACK, "test")), everyone),
        Group("two hosts", make(Hosts(WORLD, [0 if r < (size + 1) // 2 else 1 for r in everyone])), everyone),
        Group("pairs", make(Hosts(WORLD, [r // 2 for r in everyone]), "int8"), everyone),
        Group(f"parity {me % 2}", make(parity), [r for r in everyone if r % 2 == me % 2]),
        Group("first", make(first, "int8") if me < few else _unused(first), everyone[:few]),
        Group("backwards", make(backwards), everyone[::-1]),
    ]


def _unused(comm: Any) -> None:
    comm.Free()


class Programs(RuleBasedStateMachine):
    """Machine that starts operations, and waits for those in flight, each rank in an order of its own."""

    groups: list[Group]

    @initialize()
    def begin(self) -> None:
        self.flights: list[Flight] = []
        self.number = 0
        self.program: list[str] = []

    @rule(draw=draws, group=st.integers(0, 8), then=st.sampled_from(THEN), order=st.integers(0, 1 << 20))
    def operate(self, draw: Draw, group: int, then: str, order: int) -> None:
        self.program.append(f"{draw} on {group}, then {then}")
        self.number += 1
        flight = start(draw, self.groups[group], self.number)
        if flight is not None:
            self.flights.append(flight)
            if then == "wait for it":
                self._end(flight)
        if then == "look" and self.flights:  # at one of them, another one on another rank
            some = self.flights[(order + WORLD.rank) % len(self.flights)]
            self._guarded(some, lambda r: r.test())
        elif then == "wait for all":
            self._wait_for_all(order)

    def teardown(self) -> None:
        self._wait_for_all(0)

    def _wait_for_all(self, order: int) -> None:
        flights = getattr(self, "flights", [])
        mixed = flights.copy()
        random.Random(order * 64 + WORLD.rank).shuffle(mixed)
        for flight in mixed:
            self._end(flight)
        problems = [f"{flight.what}: {problem}" for flight in flights for problem in flight.problems]
        program = zlib.crc32("\n".join(getattr(self, "program", [])).encode())
        digests = {d for flight in flights if (d := flight.digest()) is not None}
        flights.clear()
        ranks = WORLD.allgather((program, problems, digests))
        assert len({p for p, _, _ in ranks}) == 1, "the ranks drew different programs"
        wrong = {rank: said for rank, (_, said, _) in enumerate(ranks) if said}
        assert not wrong, f"by rank: {wrong}"
        seen: dict[str, int] = {}
        for _, _, some in ranks:
            for key, crc in some:
                assert seen.setdefault(key, crc) == crc, f"different bits: {key}"

    def _end(self, flight: Flight) -> None:
        if flight.requests and self._guarded(flight, lambda r: r.wait(SECONDS)):
            flight.requests = []
            if problem := flight.check():
                flight.problems.append(problem)

    @staticmethod
    def _guarded(flight: Flight, do: Any) -> bool:
        """Use a flight's requests; an error of one rank is told to all at the end, so that all go on together."""
        try:
            for request in flight.requests:
                do(request)
        except Exception as error:
            flight.problems.append(f"{type(error).__name__}: {error}")
            flight.requests = []
            return False
        return True


def test_programs() -> None:
    machine = type("Seeded", (Programs,), {"groups": groups()})
    if SEED:
        seeded(SEED)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            derandomize=not SEED,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    for group in machine.groups:
        if group.comm is not None:
            group.comm.Free()
