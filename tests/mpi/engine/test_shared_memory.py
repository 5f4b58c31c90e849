"""Messages between ranks of one host by shared memory."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.engine import groups
from tests.mpi.conftest import WORLD, gaussian, identical, verdict
from tests.mpi.hosts import Hosts

SWITCH = "HYBRIDCOMP_SHARED_MEMORY"


def results(comm: hc.Communicator, codec: str, n: int) -> bytes:
    """Return the results on this rank of all operations that a codec carries."""
    p, me = comm.size, comm.rank
    out = [np.zeros(n, np.float32) for _ in range(2)]
    comm.Allreduce(gaussian(n), out[0], codec=codec)
    comm.Allreduce(gaussian(n), out[1], "avg", codec=codec)
    if not hc.get_codec(codec).linear:
        scattered, gathered, swapped = (np.zeros(m, np.float32) for m in (n, n * p, n * p))
        comm.Reduce_scatter_block(gaussian(n * p), scattered, codec=codec)
        comm.Allgather(gaussian(n), gathered, codec=codec)
        comm.Alltoall(gaussian(n * p), swapped, codec=codec)
        out += [scattered, gathered, swapped]
        counts = [[(r + 2 * q) % 3 * n // 2 for q in range(p)] for r in range(p)]
        vector = np.zeros(sum(c[me] for c in counts), np.float32)
        comm.Alltoallv(
            [gaussian(sum(counts[me])), counts[me]], [vector, [c[me] for c in counts]], codec=codec
        )
        out.append(vector)
        for root in range(p):
            told = gaussian(n)
            comm.Bcast(told, root, codec=codec)
            out.append(told)
    return b"".join(x.tobytes() for x in out)


@pytest.mark.parametrize("hosts", ["one", "pairs", "uneven"])
@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_the_same_bits_as_by_mpi(monkeypatch, codec, hosts):
    if WORLD.size == 1:
        return
    layout = Hosts(
        WORLD,
        [0] * WORLD.size
        if hosts == "one"
        else [r // 2 if hosts == "pairs" else r % 2 for r in range(WORLD.size)],
    )
    monkeypatch.delenv(SWITCH, raising=False)
    shared = hc.Communicator(layout, "none", timeout=30.0)
    monkeypatch.setenv(SWITCH, "0")
    plain = hc.Communicator(layout, "none", timeout=30.0)
    for n in (3, 70_001):
        verdict(results(shared, codec, n) == results(plain, codec, n), f"{n} elements")
    here = layout.of.count(layout.of[WORLD.rank]) > 1
    verdict(any(row.shared_bytes for row in shared.stats()) == here, "shared")
    verdict(not any(row.shared_bytes for row in plain.stats()), "switched off")
    for comm in (shared, plain):
        comm.Free()


def test_messages_are_read_in_place(make):
    if WORLD.size == 1:
        return
    comm = make("int8")
    x = gaussian(70_001)
    comm.Allreduce(x, x.copy())
    row = comm.stats()[0]
    verdict(row.shared_bytes == row.wire_bytes > 0)


@pytest.mark.parametrize("fault", ["no memory to share", "another process's number"])
def test_one_rank_that_cannot_share_is_enough(make, monkeypatch, fault):
    """All ranks then go by MPI, and all is as it was."""
    if WORLD.size == 1:
        return
    if WORLD.rank == WORLD.size - 1:
        if fault == "no memory to share":
            monkeypatch.setattr(groups, "own_arena", lambda: None)
        else:
            monkeypatch.setattr(groups, "arena_at", lambda handle: None)
    comm = make("int8")
    x = gaussian(70_001)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x) and comm.stats()[0].shared_bytes == 0)


def test_nothing_is_left_where_others_could_find_it(make):
    make("int8").Allreduce(MPI.IN_PLACE, gaussian(70_001))
    verdict(not [name for name in os.listdir("/dev/shm") if "hybridcomp" in name])
