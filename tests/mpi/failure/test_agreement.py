from __future__ import annotations

import re
import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.policy.toml import parse_policy
from tests.mpi.conftest import WORLD, gaussian, identical, verdict


def test_different_policies_are_an_error_on_every_rank():
    if WORLD.size == 1:
        return
    mine = "int8:block=128" if WORLD.rank == WORLD.size - 1 else "hybrid"
    with pytest.raises(
        hc.MismatchError, match=rf"rank 0 has 'hybrid' .*rank {WORLD.size - 1} has 'int8:block=128'"
    ):
        hc.Communicator(WORLD, mine, "dp")


@pytest.mark.ranks(least=2)
def test_lists_of_hosts_that_differ_are_an_error_on_every_rank(monkeypatch):
    last = WORLD.size - 1
    lists = ["", f"{WORLD.size}x1", f"{WORLD.size - 1},1" if last > 1 else "1x2"]
    for mine, theirs in zip(lists, lists[1:] + lists[:1], strict=True):
        monkeypatch.setenv("HYBRIDCOMP_HOSTS", theirs if WORLD.rank == last else mine)
        words = f"rank 0 has HYBRIDCOMP_HOSTS={mine or 'none'}, rank {last} has {theirs or 'none'}; give all ranks"
        with pytest.raises(hc.MismatchError, match=re.escape(words)):
            hc.Communicator(WORLD, "int8", "dp")


def test_a_list_of_hosts_that_does_not_add_up_is_named_on_every_rank(monkeypatch, make):
    wrong = f"{WORLD.size},1"
    monkeypatch.setenv("HYBRIDCOMP_HOSTS", wrong)
    with pytest.raises(hc.ConfigError, match=rf"HYBRIDCOMP_HOSTS is .*{WORLD.size + 1} ranks; the job has"):
        hc.Communicator(WORLD, "int8", "dp")
    monkeypatch.setenv("HYBRIDCOMP_HOSTS", wrong if WORLD.rank == WORLD.size - 1 else "")
    with pytest.raises(
        (hc.ConfigError, hc.RemoteError), match=rf"HYBRIDCOMP_HOSTS is .*{WORLD.size + 1} ranks"
    ):
        hc.Communicator(WORLD, "int8", "dp")
    monkeypatch.delenv("HYBRIDCOMP_HOSTS")
    x = gaussian(1000)
    make("int8").Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x))


def test_hosts_are_those_of_the_list_in_parts_of_the_job_too(monkeypatch):
    monkeypatch.setenv("HYBRIDCOMP_HOSTS", f"1,{WORLD.size - 1}" if WORLD.size > 1 else "1")
    comm = hc.Communicator(WORLD, "int8", "dp", timeout=30)
    turned = comm.Split(0, -WORLD.rank)
    alone = comm.Split(int(WORLD.rank == 0), 0)
    x = gaussian(20_000)
    y = x.copy()
    comm.Allreduce(MPI.IN_PLACE, x)
    turned.Allreduce(MPI.IN_PLACE, y)
    verdict(comm.hosts == turned.hosts == min(WORLD.size, 2) and alone.hosts == 1)
    verdict(identical(x) and identical(y))
    for one in alone, turned, comm:
        one.Free()


def test_different_codecs_in_one_call_name_both_sides(make):
    if WORLD.size == 1:
        return
    comm = make("none", timeout=5.0)
    codec = "int8:block=64" if WORLD.rank == 0 else "int8:block=128"
    with pytest.raises((hc.MismatchError, hc.RemoteError)) as caught:
        comm.Allreduce(MPI.IN_PLACE, gaussian(50_000), codec=codec)
    if isinstance(caught.value, hc.MismatchError):
        assert "rank" in str(caught.value)
        assert codec in str(caught.value)
    mismatches = WORLD.allreduce(int(isinstance(caught.value, hc.MismatchError)))
    verdict(mismatches > 0)
    verdict(True)


def test_a_rank_that_does_not_come_is_named(make):
    comm = make("int8", timeout=0.6)
    absent = WORLD.size - 1
    began = time.monotonic()
    if WORLD.size == 1:
        with pytest.raises(hc.CollectiveTimeoutError, match=r"recv number .* on axis 'dp', rank 0 of 1"):
            comm.Recv(np.zeros(4, np.float32), 0, 3)
    elif WORLD.rank != absent:
        with pytest.raises(
            hc.CollectiveTimeoutError, match=rf"all_reduce number .* rank {WORLD.rank} of .*{absent}"
        ):
            comm.Allreduce(MPI.IN_PLACE, gaussian(50_000))
        assert time.monotonic() - began < 10
    verdict(True)


def test_a_short_wait_leaves_the_operation_running(make):
    comm = make("int8")
    x = gaussian(50_000)
    request = None
    if WORLD.rank == 0:
        request = comm.Iallreduce(MPI.IN_PLACE, x)
        if WORLD.size > 1:
            with pytest.raises(hc.CollectiveTimeoutError):
                request.wait(timeout=0.1)
    WORLD.Barrier()
    if request is None:
        request = comm.Iallreduce(MPI.IN_PLACE, x)
    request.wait()
    verdict(identical(x))


def test_many_operations_in_flight_and_callbacks(make):
    comms = [make("int8"), make("int4"), make("none")]
    done: list[int] = []
    arrays, requests = [], []
    for i in range(24):
        x = gaussian(1000 * (i % 5) + 17, seed=i)
        request = comms[i % 3].Iallreduce(MPI.IN_PLACE, x)
        request.add_done_callback(lambda r, i=i: done.append(i))
        arrays.append(x)
        requests.append(request)
    for request in reversed(requests):
        request.wait()
    verdict(sorted(done) == list(range(24)))
    for x in arrays:
        verdict(identical(x))


def test_progress_needs_nobody_waiting(make):
    comm = make("int8")
    x = gaussian(400_000)
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    deadline = time.monotonic() + 20
    while not request.done and time.monotonic() < deadline:
        time.sleep(0.01)
    verdict(request.done)
    verdict(identical(x))


def test_stats_say_what_was_and_was_not_compressed(make):
    comm = make(parse_policy('[tp]\nmin_bytes = 16384\ncodec = "int8:block=128"', "tp.toml"), "tp")
    comm.Allreduce(MPI.IN_PLACE, gaussian(100_000))
    comm.Allreduce(MPI.IN_PLACE, gaussian(10))
    comm.Allreduce(MPI.IN_PLACE, np.ones(100_000, np.int32))
    rows = comm.stats()
    assert sum(r.calls for r in rows) == 3
    if WORLD.size == 1:
        assert {r.reason for r in rows} == {"one rank"}
        return
    by_codec = {r.codec: r for r in rows if r.codec != "none"}
    packed = by_codec["int8:block=128"]
    assert packed.axis == "tp"
    assert packed.raw_bytes == 400_000
    assert 3.5 < packed.plain_bytes / packed.wire_bytes < 4.1
    assert packed.encode_seconds > 0
    assert packed.decode_seconds > 0
    reasons = {r.reason for r in rows if r.codec == "none"}
    assert any("below min_bytes" in r for r in reasons)
    assert any("not floating-point" in r for r in reasons)
