"""Rules of gossip on all ranks, against their formulas on the tensors of all ranks at once, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.errors import CollectiveTimeoutError, MismatchError
from hybridcomp_lab.train.gossip.choco import Choco
from hybridcomp_lab.train.gossip.graph import make_graph
from hybridcomp_lab.train.gossip.neighbours import Neighbours
from hybridcomp_lab.train.gossip.powergossip import PowerGossip
from hybridcomp_lab.train.gossip.rules import PlainGossip, Rule
from tests.mpi.conftest import communicator
from tests.mpi.everywhere import everywhere
from tests.train import mixing

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
CHAIN = ",".join(f"{rank}-{rank + 1}" for rank in range(RANKS - 1))
GRAPHS = ["ring", "complete", *([CHAIN] if CHAIN else [])]
SHAPES = {"wide": (5, 9), "deep": (7, 2, 3), "bias": (6,), "thin": (2, 8), "one": ()}
CLOSE = 1e-9
MIXINGS = 7

Weights = mixing.Weights


@pytest.fixture(scope="module")
def comm() -> Any:
    return communicator()


def drawn(rank: int, dtype: str = "float64") -> Weights:
    """Return other tensors for every rank."""
    rng = np.random.default_rng([3, rank])
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def gossip(
    comm: Any, graph: str, make: Callable[[Weights, Neighbours], Rule], dtype: str = "float64"
) -> Rule:
    return make(drawn(WORLD.rank, dtype), Neighbours(comm, make_graph(graph, RANKS)))


def plain(tensors: Weights, neighbours: Neighbours) -> Rule:
    return PlainGossip(tensors, neighbours)


def power(rank: int) -> Callable[[Weights, Neighbours], Rule]:
    return lambda tensors, neighbours: PowerGossip(tensors, neighbours, rank)


def choco(spec: str, gamma: float, *, alike: bool = False) -> Callable[[Weights, Neighbours], Rule]:
    return lambda tensors, neighbours: Choco(tensors, neighbours, hc.get_codec(spec), gamma, alike=alike)


def check_mixings(rule: Rule, reference: Any) -> None:
    """Assert that every mixing does to this rank's tensors what the reference does to those of all."""
    wanted = [drawn(rank) for rank in range(RANKS)]
    for step in range(MIXINGS):
        rule.mix(step)
        wanted = reference.mix(wanted, step)
        mine = max(np.abs(rule.tensors[name] - wanted[WORLD.rank][name]).max() for name in SHAPES)
        assert everywhere(mine < CLOSE)


@pytest.mark.parametrize("graph", GRAPHS)
def test_plain_gossip_multiplies_by_the_matrix(comm: Any, graph: str) -> None:
    rule = gossip(comm, graph, plain)
    check_mixings(rule, mixing.Plain(rule.neighbours.graph))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    ("spec", "gamma"), [("topk:ratio=0.2", 0.2), ("int8:block=8:rounding=stochastic", 0.9), ("none", 1.0)]
)
def test_choco_mixes_estimates(comm: Any, graph: str, spec: str, gamma: float) -> None:
    rule = gossip(comm, graph, choco(spec, gamma))
    known = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(RANKS)]
    check_mixings(rule, mixing.Choco(rule.neighbours.graph, spec, gamma, known))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("rank", [1, 2])
def test_powergossip_projects_differences(comm: Any, graph: str, rank: int) -> None:
    rule = gossip(comm, graph, power(rank))
    factors: mixing.Factors = {}
    for told in WORLD.allgather(mixing.first_factors(rule)):
        for key, factor in told.items():
            assert np.array_equal(factors.setdefault(key, factor), factor)  # both ends have the same factor
    check_mixings(rule, mixing.PowerGossip(rule.neighbours.graph, factors))


RULES = [plain, power(1), choco("topk:ratio=0.2", 0.3)]


@pytest.mark.parametrize("make", RULES)
def test_saved_states_go_on_with_the_same_bits(
    comm: Any, make: Callable[[Weights, Neighbours], Rule]
) -> None:
    first, second = (gossip(comm, "ring", make, "float32") for _ in range(2))
    for step in range(3):
        first.mix(step)
    for name, tensor in first.tensors.items():
        second.tensors[name][...] = tensor
    for name, array in first.state().items():
        second.state()[name][...] = array
    for step in range(3, 5):
        first.mix(step)
        second.mix(step)
    same = all(np.array_equal(first.tensors[name], second.tensors[name]) for name in SHAPES)
    assert everywhere(same)
    assert RANKS == 1 or everywhere(
        not np.array_equal(first.tensors["wide"], drawn(WORLD.rank, "float32")["wide"])
    )


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("make", [power(1), power(2)])
def test_powergossip_finds_differences_after_all_were_equal(
    comm: Any, make: Callable[[Weights, Neighbours], Rule]
) -> None:
    tensors = drawn(0)
    rule = make(tensors, Neighbours(comm, make_graph("complete", RANKS)))
    for step in range(4):
        rule.mix(step)
    assert everywhere(all(np.array_equal(tensors[name], drawn(0)[name]) for name in SHAPES))
    tensors["wide"][3, 4] += WORLD.rank
    for step in range(4, 60):
        rule.mix(step)
    assert everywhere(abs(tensors["wide"][3, 4] - drawn(0)["wide"][3, 4] - (RANKS - 1) / 2) < 1e-6)


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_the_neighbours(
    comm: Any, make: Callable[[Weights, Neighbours], Rule], value: float
) -> None:
    rule = gossip(comm, "complete", make)
    if WORLD.rank == 0:
        rule.tensors["wide"][1, 1] = value
    with np.errstate(invalid="ignore"):
        for step in range(2):
            rule.mix(step)
    assert everywhere(not np.isfinite(rule.tensors["wide"]).all())
    assert everywhere(bool(np.isfinite(rule.tensors["bias"]).all()))


def test_bytes_are_counted(comm: Any) -> None:
    rule = gossip(comm, "ring", power(1), "float32")
    rule.mix(0)
    degree, elements = len(rule.neighbours.weights), sum(int(np.prod(shape)) for shape in SHAPES.values())
    (row,) = rule.neighbours.rows()
    assert (row.axis, row.op, row.codec, row.calls) == ("dp", "gossip", "powergossip:rank=1", 1)
    assert row.plain_bytes == degree * 4 * elements
    # A header, a column of each matrix, and the vectors.
    assert row.wire_bytes == degree * (8 + 4 * (9 + 6 + 8 + 6 + 1))


@pytest.mark.ranks(least=2)
def test_a_late_neighbour_is_named() -> None:
    comm = communicator(timeout=0.5)
    rule = gossip(comm, "complete", plain)
    before = {name: tensor.copy() for name, tensor in rule.tensors.items()}
    words = ""
    if WORLD.rank != RANKS - 1:
        with pytest.raises(CollectiveTimeoutError) as caught:
            rule.mix(4)
        words = str(caught.value)
    WORLD.Barrier()
    assert everywhere(WORLD.rank == RANKS - 1 or f"rank {RANKS - 1}" in words), words
    assert everywhere(WORLD.rank == RANKS - 1 or "gossip of step 4 between ranks" in words), words
    assert everywhere(all(np.array_equal(before[name], rule.tensors[name]) for name in SHAPES))


@pytest.mark.ranks(least=2)
def test_a_neighbour_at_another_step_is_named() -> None:
    rule = gossip(communicator(), "complete", plain)
    with pytest.raises(MismatchError, match=rf"rank {WORLD.rank} is at step {WORLD.rank}, and rank"):
        rule.mix(WORLD.rank)


def test_tensors_that_cannot_gossip_are_named(comm: Any) -> None:
    neighbours = Neighbours(comm, make_graph("ring", RANKS))
    for tensors, words in (
        ({}, "all float32, or all float64, not none"),
        ({"a": np.zeros(2), "b": np.zeros(2, np.float32)}, "not float32, float64"),
        ({"a": np.zeros(2, np.int32)}, "not int32"),
        ({"a": np.zeros((2, 3)).T}, "C-contiguous, and a is not"),
    ):
        with pytest.raises(ValueError, match=words):
            PlainGossip(tensors, neighbours)
