"""HYBRIDCOMP_DEBUG=detail: ranks that are about to do different things are told before data moves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.agreement.consistency import Comparison
from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.variables import DEBUG
from tests.mpi.conftest import WORLD, gaussian, identical, verdict

LAST = WORLD.size - 1
odd = WORLD.rank == LAST


def ones(n: int = 3000, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(n, dtype)


Starts = Callable[[hc.Communicator], Any]
CASES: dict[str, tuple[Starts, Starts, str, str]] = {
    "operation": (
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones()),
        lambda c: c.Ibcast(ones(), 0),
        "all_reduce",
        "broadcast",
    ),
    "count": (
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones()),
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones(3001)),
        "count 3000",
        "count 3001",
    ),
    "dtype": (
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones()),
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones(dtype=np.int32)),
        "dtype float32",
        "dtype int32",
    ),
    "codec": (
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones(), codec="int8:block=64"),
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones(), codec="int8:block=128"),
        "codec int8:block=64",
        "codec int8:block=128",
    ),
    "root": (lambda c: c.Ibcast(ones(), 0), lambda c: c.Ibcast(ones(), 1), "root 0", "root 1"),
    "reduction": (
        lambda c: c.Ireduce(ones(), ones(), MPI.SUM),
        lambda c: c.Ireduce(ones(), ones(), MPI.MAX),
        "reduction sum",
        "reduction max",
    ),
    "name": (
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones(), name="a.weight"),
        lambda c: c.Iallreduce(MPI.IN_PLACE, ones(), name="b.weight"),
        "name a.weight",
        "name b.weight",
    ),
}


@pytest.fixture(autouse=True)
def detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG.name, "detail")


@pytest.mark.parametrize("kind", CASES)
def test_what_differs_is_named_on_all_ranks(make, kind):
    if WORLD.size == 1:
        return
    usual, other, mine, theirs = CASES[kind]
    comm = make("int8")
    with pytest.raises(hc.MismatchError) as caught:
        (other if odd else usual)(comm).wait()
    text = str(caught.value)
    verdict(
        f"number 1 on axis 'dp', rank {WORLD.rank} of" in text
        and f"rank {LAST} differs: rank {LAST} started" in text
        and mine in text
        and theirs in text,
        text,
    )


def parts(rank: int, n: int) -> list[int]:
    """Return counts of ``n`` elements for one rank, 3 for the others."""
    return [n if q == rank else 3 for q in range(WORLD.size)]


def start_alltoallv(c: hc.Communicator, codec: str, n: int) -> Any:
    """Send ``n`` elements from the last rank to rank 0, which receives 3 from each."""
    sends = parts(0, n if odd else 3)
    got = np.zeros(3 * WORLD.size, np.float32)
    return c.Ialltoallv([ones(sum(sends)), sends], [got, parts(0, 3)], codec=codec)


def start_gatherv(c: hc.Communicator, codec: str, n: int) -> Any:
    """Send ``n`` elements from the last rank to rank 0, which receives 3 from each."""
    got = [np.zeros(3 * WORLD.size, np.float32), parts(0, 3)] if WORLD.rank == 0 else None
    return c.Igatherv(ones(n if odd else 3), got, 0, codec=codec)


def start_scatterv(c: hc.Communicator, codec: str, n: int) -> Any:
    """Send 3 elements from the last rank to each, of which rank 0 receives ``n``."""
    given = [ones(3 * WORLD.size), parts(0, 3)] if odd else None
    return c.Iscatterv(given, np.zeros(n if WORLD.rank == 0 else 3, np.float32), LAST, codec=codec)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("start", [start_alltoallv, start_gatherv, start_scatterv])
def test_counts_between_two_ranks_are_compared(make, start, codec):
    if WORLD.size == 1:
        return
    comm = make("none")
    for n in (2, 4):
        with pytest.raises(hc.MismatchError) as caught:
            start(comm, codec, n).wait()
        sent, taken = (3, n) if start is start_scatterv else (n, 3)
        said = f"rank {LAST} sends {sent} elements to rank 0, which receives {taken} from it"
        verdict(said in str(caught.value), str(caught.value))
    start(comm, codec, 3).wait()


def test_a_rank_receives_from_itself_what_it_sends(make):
    comm = make("none")
    counts, more = parts(WORLD.rank, 5), parts(WORLD.rank, 6)
    with pytest.raises(ValueError, match="sends 5 elements to itself, and receives 6: these must be equal"):
        comm.Alltoallv([ones(sum(counts)), counts], [ones(sum(more)), more])


def test_the_same_is_done_as_ever(make, monkeypatch):
    comm = make("hybrid")
    plain, x = gaussian(100_000), gaussian(100_000)
    requests = [comm.Iallreduce(MPI.IN_PLACE, x), comm.Ibcast(plain, 0), comm.Ibarrier()]
    for request in reversed(requests):
        request.wait()
    verdict(identical(x) and bool((plain == gaussian(100_000, 0)).all()))
    counts = [n + 10 for n in range(WORLD.size)]
    got = np.zeros(WORLD.size * counts[WORLD.rank], np.float32)
    comm.Alltoallv([gaussian(sum(counts)), counts], [got, [counts[WORLD.rank]] * WORLD.size])
    verdict(bool(got.any()))
    monkeypatch.delenv(DEBUG.name)
    y = gaussian(100_000)
    make("hybrid").Allreduce(MPI.IN_PLACE, y)
    verdict(bool((x == y).all()))


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(DEBUG.name, "verbose")
    with pytest.raises(hc.ConfigError, match=r"HYBRIDCOMP_DEBUG is 'verbose'; allowed: off or detail"):
        hc.Communicator(WORLD, "none")


def test_levels_that_differ_are_an_error_on_every_rank(monkeypatch):
    if WORLD.size == 1:
        return
    monkeypatch.setenv(DEBUG.name, "off" if odd else "detail")
    with pytest.raises(
        hc.MismatchError, match=rf"rank 0 has HYBRIDCOMP_DEBUG=detail, rank {LAST} has off; give all"
    ):
        hc.Communicator(WORLD, "none")


def test_operations_begin_in_order_whichever_comparison_ends_first():
    slow = MPI.Grequest.Start(lambda status: None, lambda: None, lambda completed: None)
    requests = [slow, MPI.REQUEST_NULL]

    class Alone:
        """A communicator of one rank, whose first comparison is slow."""

        def Get_size(self) -> int:
            return 1

        def Iallgather(self, card: Any, cards: Any) -> MPI.Request:
            cards[0][:] = card[0]
            return requests.pop(0)

    begun: list[int] = []

    def steps(number: int) -> Steps:
        begun.append(number)
        yield Pending([], [])

    comparison = Comparison(Alone())
    started = [
        engine().start(comparison.before(steps(number), number, "a test", "the same"), "a test", 20.0)
        for number in (1, 2)
    ]
    engine().poll()
    verdict(begun == [])
    slow.Complete()
    for request in reversed(started):
        request.wait()
    verdict(begun == [1, 2])


def overlapping(comm: hc.Communicator, seed: int) -> None:
    """Start operations of the engine's and of Python's, at other moments on each rank, and check what they give."""
    own = random.Random(seed * 100 + WORLD.rank)
    kinds = ["int8", "powersgd:rank=2", "lossless", "topk:ratio=0.5"]
    started = []
    for codec in random.Random(seed).choices(kinds, k=6):
        x = np.full((64, 50), 1 + WORLD.rank, np.float32)
        started.append((comm.Iallreduce(MPI.IN_PLACE, x, codec=codec), x, codec))
        time.sleep(own.choice([0, 0, 1e-3]))
    own.shuffle(started)
    for request, x, codec in started:
        request.wait()
        total = WORLD.size * (WORLD.size + 1) / 2
        assert codec.startswith("topk") or np.allclose(x, total, rtol=0.02), (codec, x[:3])


def test_operations_of_both_kinds_meet_in_order(make):
    comm = make("none")
    for seed in range(12):
        overlapping(comm, seed)
    verdict(True)


def test_operations_meet_after_ranks_have_differed(make):
    """The ranks have taken different numbers of tags for operations that they then did not do."""
    if WORLD.size == 1:
        return
    comm = make("none")
    x = np.ones((64, 50), np.float32)
    for _ in range(3):
        request = comm.Iallreduce(MPI.IN_PLACE, x.copy(), codec="powersgd:rank=2" if odd else "int8")
        with pytest.raises(hc.MismatchError):
            request.wait()
    for seed in range(3):
        overlapping(comm, seed)
    verdict(True)
