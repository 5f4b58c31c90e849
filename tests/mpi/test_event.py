"""Event-triggered gossip on all ranks, against its formulas in fp64; and the window that it puts into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp.errors import CollectiveTimeoutError
from hybridcomp_lab.train.gossip.event import EventGossip
from hybridcomp_lab.train.gossip.graph import make_graph
from hybridcomp_lab.train.gossip.neighbours import Neighbours
from hybridcomp_lab.train.gossip.window import Window
from tests.mpi.conftest import communicator
from tests.mpi.everywhere import everywhere
from tests.train import mixing

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
SHAPES = {"wide": (5, 9), "bias": (6,), "one": ()}
HOW: dict[str, Any] = {"horizon": 0.9, "warmup": 3, "reach": 1.5}
STEPS = 12

Weights = mixing.Weights


@pytest.fixture(scope="module")
def comm() -> Any:
    return communicator()


def start() -> Weights:
    """Return the same tensors on every rank, as when training begins."""
    rng = np.random.default_rng(3)
    return {name: np.asarray(rng.standard_normal(shape)) for name, shape in SHAPES.items()}


def trained(step: int, rank: int) -> Weights:
    """Return an optimizer's changes: tensors of different speeds, which turn."""
    rng = np.random.default_rng([4, step, rank])
    return {
        name: np.asarray(rng.standard_normal(shape) * 0.1 * (1 + number * np.sin(step)))
        for number, (name, shape) in enumerate(SHAPES.items())
    }


@contextmanager
def gossip(comm: Any, graph: str = "ring", **how: Any) -> Iterator[EventGossip]:
    made = make_graph(graph, RANKS)
    tensors = start()
    sizes = [tensor.nbytes for tensor in tensors.values()]
    window = Window(comm, [made.neighbours(rank) for rank in range(RANKS)], sizes)
    yield EventGossip(tensors, Neighbours(comm, made, "put"), window, **HOW | how)
    window.Free()


def stepped(rule: EventGossip, step: int) -> None:
    """Do a step of training, and a mixing."""
    for name, change in trained(step, WORLD.rank).items():
        rule.tensors[name][...] += change
    rule.mix(step)


@pytest.mark.parametrize(("graph", "stale"), [("ring", "skip"), ("complete", "mix"), ("ring", "pair")])
def test_tensors_go_when_they_have_moved(comm: Any, graph: str, stale: str) -> None:
    with gossip(comm, graph, stale=stale) as rule:
        starts = [start() for _ in range(RANKS)]
        reference = mixing.Event(rule.neighbours.graph, starts, **HOW, stale=stale)
        wanted = [start() for _ in range(RANKS)]
        for step in range(STEPS):
            stepped(rule, step)
            for rank, x in enumerate(wanted):
                for name, change in trained(step, rank).items():
                    x[name] = x[name] + change
            wanted = reference.mix(wanted, step)
            off = max(np.abs(rule.tensors[name] - wanted[WORLD.rank][name]).max() for name in SHAPES)
            assert everywhere(off < 1e-9)
        assert everywhere(rule.messages.tolist() == reference.messages[WORLD.rank])
        degree = len(rule.neighbours.weights)
        due, sent = rule.messages.tolist()
        assert everywhere(RANKS == 1 or HOW["warmup"] * len(SHAPES) * degree < sent < due)
        (row,) = rule.neighbours.rows()
        assert (row.op, row.plain_bytes) == (
            "put",
            STEPS * degree * sum(t.nbytes for t in rule.tensors.values()),
        )
        assert everywhere(RANKS == 1 or row.wire_bytes > 0)


def test_pairs_keep_the_mean_of_all(comm: Any) -> None:
    with gossip(comm, stale="pair") as rule:
        for step in range(STEPS):
            for name, change in trained(step, WORLD.rank).items():
                rule.tensors[name][...] += change
            mean = {name: WORLD.allreduce(tensor) / RANKS for name, tensor in rule.tensors.items()}
            rule.mix(step)
            off = max(
                np.abs(WORLD.allreduce(tensor) / RANKS - mean[name]).max()
                for name, tensor in rule.tensors.items()
            )
            assert everywhere(off < 1e-12)
        assert everywhere(RANKS == 1 or rule.messages[1] < rule.messages[0])


def test_a_horizon_of_zero_sends_always(comm: Any) -> None:
    with gossip(comm, horizon=0.0, warmup=0) as rule:
        for step in range(4):
            stepped(rule, step)
        assert rule.messages[0] == rule.messages[1]


def test_saved_states_go_on_with_the_same_bits(comm: Any) -> None:
    with gossip(comm) as first, gossip(comm) as second:
        for step in range(7):
            stepped(first, step)
        for name, tensor in first.tensors.items():
            second.tensors[name][...] = tensor
        for name, array in first.state().items():
            second.state()[name][...] = array
        for step in range(7, STEPS):
            stepped(first, step)
            stepped(second, step)
        assert everywhere(all(np.array_equal(first.tensors[name], second.tensors[name]) for name in SHAPES))
        states = first.state(), second.state()
        assert everywhere(all(np.array_equal(states[0][name], states[1][name]) for name in states[0]))


@pytest.mark.ranks(least=2)
def test_free_reads_wait_for_nobody_and_reach_the_neighbours(comm: Any) -> None:
    with gossip(comm, "complete", ordered=False, horizon=0.0) as rule:
        if WORLD.rank == 0:
            for step in range(3):  # the others come later
                stepped(rule, step)
        WORLD.Barrier()
        if WORLD.rank:
            for step in range(3):
                stepped(rule, step)
        for step in range(3, 60):
            rule.mix(step)
            WORLD.Barrier()
        mine = np.concatenate([tensor.ravel() for tensor in rule.tensors.values()])
        everyone = np.array(WORLD.allgather(mine))
        assert np.abs(everyone - everyone.mean(0)).max() < 1e-3


@pytest.mark.ranks(least=2)
def test_values_that_are_not_finite_are_sent(comm: Any) -> None:
    with gossip(comm, "complete", warmup=0) as rule:
        for step in range(5):
            stepped(rule, step)
        if WORLD.rank == 0:
            rule.tensors["wide"][1, 1] = np.nan
        stepped(rule, 5)
        assert everywhere(bool(np.isnan(rule.tensors["wide"][1, 1])))
        assert everywhere(bool(np.isfinite(rule.tensors["bias"]).all()))


@pytest.mark.ranks(least=2)
def test_a_record_that_is_not_whole_is_not_taken(comm: Any) -> None:
    others = [[other for other in range(RANKS) if other != rank] for rank in range(RANKS)]
    window = Window(comm, others, [40])
    source = (WORLD.rank + 1) % RANKS
    got = np.zeros(40, np.uint8)

    def arrived(step: int, value: int) -> None:
        """Have all ranks put a record, and wait until it is here."""
        window.put(0, np.full(40, value, np.uint8), step, others[WORLD.rank])
        window.progress_until(
            lambda: window.puts_done(step) and window.newest(0, source, step - 1, got) == step,
            lambda: "a test's put",
        )
        WORLD.Barrier()

    assert everywhere(window.newest(0, source, -1, got) == -1)  # nothing is there yet
    arrived(1, 7)
    arrived(2, 8)
    assert everywhere(bool((got == 8).all()))
    # A byte of the newest one is still that of an older one: the one before it is taken.
    place = window._place(WORLD.rank, source, 0, 0)
    window._mine[place + 40] ^= 1
    assert everywhere(window.newest(0, source, 0, got) == 1)
    assert everywhere(bool((got == 7).all()))
    assert everywhere(window.newest(0, source, 1, got) == 1)
    window._mine[place + 40] ^= 1
    assert everywhere(window.newest(0, source, 1, got) == 2)
    assert everywhere(window.newest(0, source, 0, got, only=1) == 1)
    window.Free()
    window.Free()


@pytest.mark.ranks(least=2)
def test_a_late_neighbour_is_named() -> None:
    comm = communicator()
    with gossip(comm, "complete") as rule:
        comm.timeout = rule._window.timeout = 0.5
        words = ""
        if WORLD.rank != RANKS - 1:
            with pytest.raises(CollectiveTimeoutError) as caught:
                rule.mix(4)
            words = str(caught.value)
        WORLD.Barrier()
        assert everywhere(WORLD.rank == RANKS - 1 or f"put of step 4 between ranks {WORLD.rank} and" in words)
        assert everywhere(WORLD.rank == RANKS - 1 or f"rank {RANKS - 1}" in words)
        rule._window.timeout = 30.0


@pytest.mark.ranks(least=2)
def test_a_put_that_does_not_come_is_named(comm: Any) -> None:
    with gossip(comm, "complete") as rule:
        window = rule._window
        window.timeout = 0.3
        put = window.put
        if WORLD.rank == 0:
            window.put = lambda *_: 0  # type: ignore[method-assign,assignment]  # announced, and not done
        words = ""
        try:
            rule.mix(0)
        except CollectiveTimeoutError as late:
            words = str(late)
        window.put, window.timeout = put, 30.0  # type: ignore[method-assign]
        WORLD.Barrier()
        wanted = "the put of 'wide' of step 0 by rank 0, which has announced it, on axis 'dp'"
        assert everywhere((wanted in words) == (WORLD.rank != 0)), words
