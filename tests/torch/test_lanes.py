"""Lanes between ranks of a host, whose messages stay in memory that they share: here two ends in one process."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.collectives.transport.arena import make_arena
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange import lanes as lanes_module
from hybridcomp.torch.exchange.lanes import ArenaPool, Lanes, join_host
from tests.torch.test_torchrun import Started, job, written

__all__ = ["job"]

SECONDS = 20.0
ONE_HOST = Topology((0, 0))


def ends(*, timeout: float = SECONDS) -> tuple[Lanes, Lanes]:
    made = [Lanes([1 - rank], ArenaPool(make_arena()), timeout) for rank in range(2)]
    for rank, one in enumerate(made):
        one.connect({1 - rank: made[1 - rank].told}, rank)
    return made[0], made[1]


def filled(pool: ArenaPool, values: np.ndarray) -> np.ndarray:
    buffer = pool.take(values.size)
    buffer[:] = values
    return buffer


def test_messages_come_in_place_or_as_copies() -> None:
    one, other = ends()
    at_home = filled(one.pool, np.arange(100, dtype=np.uint8))
    elsewhere = [np.arange(n, dtype=np.uint8) for n in (0, 1, 77)]
    number = one.send({1: [(7, at_home[10:90]), *((9 + i, data) for i, data in enumerate(elsewhere))]}, "op")
    at_home[20] = 200  # no copy was made
    elsewhere[2][:] = 0
    parcel = other.receive(number, "op")[0]
    assert [tag for tag, _ in parcel] == [7, 9, 10, 11]
    assert parcel[0][1].tolist() == [*range(10, 20), 200, *range(21, 90)]
    assert [data.tolist() for _, data in parcel[1:]] == [[], [0], list(range(77))]
    other.send({}, "op")
    assert one.receive(1, "op") == {1: []}


def test_a_buffer_is_used_again_once_it_was_read() -> None:
    one, other = ends()
    buffer = filled(one.pool, np.full(5000, 3, np.uint8))
    place = buffer.__array_interface__["data"][0]
    number = one.send({1: [(1, buffer)]}, "op")
    one.pool.give(buffer)

    def taken(count: int) -> list[int]:
        several = [one.pool.take(5000) for _ in range(count)]
        for each in several:
            one.pool.give(each)
        return [each.__array_interface__["data"][0] for each in several]

    assert place not in taken(4)
    parcel = other.receive(number, "op")
    assert place not in taken(8)
    assert parcel[0][0][1].tolist() == [3] * 5000
    other.release(number)
    assert place in taken(12)  # more than are free


def test_exchanges_are_waited_for_in_any_order() -> None:
    one, other = ends()
    numbers = [one.send({1: [(1, np.full(3, i, np.uint8))]}, "op") for i in range(3)]
    for i in (2, 0, 1):
        assert other.receive(numbers[i], "op")[0][0][1].tolist() == [i] * 3


def test_many_exchanges_go_round() -> None:
    """More than a ring holds, by two threads that wait for each other."""
    sides = ends()
    wrong: list[object] = []

    def run(side: Lanes, rank: int) -> None:
        try:
            for i in range(1, 1001):
                value = np.full(10 + i % 7, (i + rank) % 251, np.uint8)
                assert side.send({1 - rank: [(i, value)]}, "op") == i
                ((tag, data),) = side.receive(i, "op")[1 - rank]
                assert (tag, data.tolist()) == (i, [(i + 1 - rank) % 251] * (10 + i % 7))
                side.release(i)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(side, rank)) for rank, side in enumerate(sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def send_often(side: Lanes) -> None:
    for _ in range(300):
        side.send({}, "op")


def test_who_does_not_come_is_named_in_time() -> None:
    one, _other = ends(timeout=0.3)
    number = one.send({}, "all_reduce number 4")
    began = time.monotonic()
    with pytest.raises(
        hc.CollectiveTimeoutError, match=r"all_reduce number 4: no messages of rank 1 .* 0\.3 s"
    ):
        one.receive(number, "all_reduce number 4")
    assert time.monotonic() - began < SECONDS / 2
    with pytest.raises(hc.CollectiveTimeoutError, match="rank 1 of this host took no message"):
        send_often(one)


def test_who_leaves_says_why_after_what_it_sent() -> None:
    one, other = ends()
    one.send({1: [(1, np.ones(4, np.uint8))]}, "op")
    one.leave(ValueError("no \x1b[31mmore"))
    assert other.receive(1, "op")[0][0][1].tolist() == [1] * 4
    with pytest.raises(
        hc.RemoteError, match=r"op: rank 0 has left the exchange: ValueError: no \\x1b\[31mmore"
    ):
        other.receive(2, "op")
    with pytest.raises(ValueError, match="more"):
        one.send({}, "op")


@pytest.mark.parametrize("at", [0, 40, 48, 56])
def test_a_table_that_points_elsewhere_is_refused(at: int) -> None:
    """The count, and a message's block, place and length."""
    one, other = ends()
    first = one.pool.take(1)
    one.pool.give(first)
    number = one.send({1: [(1, np.ones(4, np.uint8))]}, "op")  # the table is in the block given back last
    first.base[first.__array_interface__["data"][0] - one.pool.arena.start :][at : at + 8] = 0xEE
    with pytest.raises(hc.WireError, match="rank 0 of this host handed over what is no parcel"):
        other.receive(number, "op")


@pytest.mark.parametrize(
    "told", ["", "1 2 3", "1 2 3 4 x", "-1 2 3 4 5", "1 2 3 4 5\n", "9" * 400, "१ 2 3 4 5"]
)
def test_what_cannot_be_right_is_refused(told: str) -> None:
    lanes = Lanes([1], ArenaPool(make_arena()), SECONDS)
    with pytest.raises(ValueError, match="rank 1 told"):
        lanes.connect({1: told}, 0)


def test_rings_outside_of_the_arena_are_refused() -> None:
    lanes, other = (Lanes([1 - rank], ArenaPool(make_arena()), SECONDS) for rank in range(2))
    *handle, _rings = other.told.split()
    for rings in (0, 64, 129, int(handle[3]) - 64, 1 << 50):
        with pytest.raises(ValueError, match="rank 1 told"):
            lanes.connect({1: " ".join([*handle, str(rings)])}, 0)


@pytest.mark.parametrize("fault", ["no memory", "the other has none", "not mapped"])
def test_without_shared_memory_the_reason_is_known(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    other = Lanes([0], ArenaPool(make_arena()), SECONDS)

    def gather(text: str) -> list[str]:
        if fault == "the other has none":
            return [text, "" if " " in text or text.isdigit() else "OSError: another's"]
        return [text, other.told if not text.startswith("OSError") else ""]

    def fail(*_: object) -> None:
        raise OSError("no space")

    if fault == "no memory":
        monkeypatch.setattr(lanes_module, "own_pool", fail)
    elif fault == "not mapped":
        monkeypatch.setattr(lanes_module, "arena_at", lambda handle: None)
    found, why = join_host(ONE_HOST, 0, SECONDS, gather)
    assert found is None
    assert {
        "no memory": "rank 0 shares no memory: OSError: no space",
        "the other has none": "rank 1 shares no memory: OSError: another's",
        "not mapped": "rank 0 shares no memory: OSError: the memory of process",
    }[fault] in why


@pytest.mark.parametrize(("hosts", "victim"), [("3", 1), ("2,2", 3), ("3,1", 3)])
def test_a_killed_rank_ends_the_others_wait(job: Started, tmp_path: Path, hosts: str, victim: int) -> None:
    """Long before the timeout, on its host and on others; and no file of this memory has a name that would stay."""
    counts = [int(count) for count in hosts.split(",")]
    host = [at for at, count in enumerate(counts) for _ in range(count)]
    script = written(
        tmp_path,
        f"""
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
state = hct.HookState("int8:min_bytes=0")
def average(step):
    averaging = state.average(torch.ones(5000), lambda: [("w", (5000,))], "w", step)
    state.flush()
    averaging.wait()
average(0)
dist.barrier()  # all have ended it
named = {{line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line}}
assert not named, named
began = time.monotonic()
if rank == {victim}:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    average(1)
except Exception as error:
    print("after", time.monotonic() - began < 30, type(error).__name__, error, flush=True)
    os._exit(3)
""",
    )
    ended = job.ranks(script, len(host), HYBRIDCOMP_HOSTS=hosts)
    assert ended[victim][0] == -signal.SIGKILL
    for rank in set(range(len(host))) - {victim}:
        status, printed = ended[rank]
        named = f"after True RemoteError all_reduce number 2 on axis 'dp', rank {rank} of {len(host)}: "
        assert (status, named in printed) == (3, True), printed
        assert (f"the process of rank {victim} of this host" in printed) == (host[rank] == host[victim]), (
            printed
        )
