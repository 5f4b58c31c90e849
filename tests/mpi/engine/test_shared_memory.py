"""Messages between ranks of one host by shared memory."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.transport import arena as arenas
from hybridcomp.collectives.transport import shared_memory
from hybridcomp.errors import CollectiveTimeoutError, MismatchError, WireError
from tests.mpi.conftest import WORLD, communicator, gaussian, identical, verdict
from tests.mpi.hosts import Hosts

SWITCH = "HYBRIDCOMP_SHARED_MEMORY"


@pytest.fixture
def by_python(make):
    """Make communicators whose messages go by Python's transport."""

    def of(policy: str, **more: float) -> hc.Communicator:
        comm = make(policy, **more)
        comm._programs = None
        return comm

    return of


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
    peers = shared._transport.shm_peers
    expected = {q for q in range(WORLD.size) if layout.of[q] == layout.of[WORLD.rank]} - {WORLD.rank}
    verdict((set(peers.ranks) if peers else set()) == expected, "peers")
    verdict(plain._transport.shm_peers is None, "switched off")
    for n in (3, 70_001):
        verdict(results(shared, codec, n) == results(plain, codec, n), f"{n} elements")
    for comm in (shared, plain):
        comm.Free()


def test_descriptors_are_what_travels(make):
    if WORLD.size == 1:
        return
    comm = make("int8")
    x = gaussian(70_001)
    comm.Allreduce(x, x.copy())
    row = comm.stats()[0]
    verdict(row.shared_bytes == row.wire_bytes > 0)


def test_blocks_are_used_again(make):
    """Blocks are used again on two communicators of the same ranks, and on one of the even or the odd ones."""
    if WORLD.size == 1:
        return
    parts = WORLD.Split(WORLD.rank % 2)
    comms = [make("int8"), make("lossless"), hc.Communicator(parts, "int8", timeout=30.0)]
    pool = shared_memory.own_pool()
    pool._collect()
    before = set(pool._leased)  # blocks of operations that have failed on a reader
    used = []
    for _ in range(4):
        for n in (1001, 70_001):
            for comm in comms:
                x, y = gaussian(n), np.empty(n * comm.size, np.float32)
                comm.Allreduce(MPI.IN_PLACE, x)
                WORLD.Barrier()
                comm.Allgather(x, y)
                WORLD.Barrier()
                comm.Bcast(x, comm.size - 1)
                WORLD.Barrier()
        used.append(pool.used)
    verdict(len(set(used)) == 1, f"{used}")
    pool._collect()
    verdict(set(pool._leased) <= before, "blocks are leased though all has been read")
    comms[2].Free()
    parts.Free()


def test_a_sender_waits_for_late_readers(by_python, monkeypatch):
    if WORLD.size == 1:
        return
    monkeypatch.setattr(arenas, "_MOST_LEASED", 1 << 20)
    comm = by_python("none")
    x = gaussian(100_000)
    comm.Bcast(x, 0, codec="lossless")
    WORLD.Barrier()
    before = shared_memory.own_pool().used
    for _ in range(30):
        if WORLD.rank:
            time.sleep(0.002)
        comm.Bcast(x, 0, codec="lossless")
    verdict(
        shared_memory.own_pool().used - before <= 4 << 20, f"{shared_memory.own_pool().used - before} bytes"
    )
    verdict(identical(x))


def test_a_sender_whose_readers_stay_away_says_so(by_python, monkeypatch):
    if WORLD.size == 1:
        return
    monkeypatch.setattr(arenas, "_MOST_LEASED", -1)
    comm = by_python("none", timeout=0.5)
    x = gaussian(50_000)
    if WORLD.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"broadcast .* waiting for ranks of this host"):
            comm.Bcast(x, 0, codec="int8")
    WORLD.Barrier()
    late = ""
    if WORLD.rank:
        try:
            comm.Bcast(x, 0, codec="int8")  # what was lent is still there
        except CollectiveTimeoutError as error:  # unless it has heard of it first
            late = str(error)
    want = WORLD.bcast(x.tobytes(), root=0)
    verdict("rank 0 gave up" in late if late else x.tobytes() == want, late)


@pytest.mark.parametrize("fault", ["no memory to share", "another process's number"])
def test_one_rank_that_cannot_share_is_enough(make, monkeypatch, fault):
    """All ranks then go by MPI, and all is as it was."""
    if WORLD.size == 1:
        return
    if WORLD.rank == WORLD.size - 1:
        if fault == "no memory to share":
            monkeypatch.setattr(shared_memory, "own_pool", lambda: None)
        else:
            monkeypatch.setattr(shared_memory, "_arena_at", lambda handle: None)
    comm = make("int8")
    verdict(comm._transport.shm_peers is None)
    x = gaussian(70_001)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x))


def hostile(comm: hc.Communicator, data: np.ndarray) -> None:
    """Rank 0 sends bytes of its own making where rank 1 waits for a broadcast's; others wait in vain."""
    if comm.rank == 0:
        comm._transport.isend(data, 1, comm._transport.tag()).Wait()


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("nothing", WireError),
        ("three bytes", WireError),
        ("ten bytes of a descriptor", WireError),
        ("a descriptor of an unknown arena", WireError),
        ("a descriptor of what is outside", WireError),
        ("a descriptor of noise", WireError),
        ("a descriptor of more than there is room for", MismatchError),
    ],
)
def test_hostile_descriptors(by_python, what, error):
    if WORLD.size == 1:
        return
    comm = by_python("none", timeout=2.0)
    pool = shared_memory.own_pool()
    x = gaussian(50_000)
    for _ in range(3):  # pool buffers now hold descriptors of messages
        comm.Bcast(x, 0, codec="int8")
        WORLD.Barrier()
    block = pool.take(8 << 20)
    block[:4096] = 0xA5
    publish = comm._transport.shm_peers.publish
    sent = publish(block[:40_000] if what == "a descriptor of noise" else block, 1)
    if what == "nothing":
        sent = sent[:0]
    elif what == "three bytes":
        sent = sent[:3]
    elif what == "ten bytes of a descriptor":
        sent = sent[:10]
    elif what == "a descriptor of an unknown arena":
        sent[8:16] ^= 1
    elif what == "a descriptor of what is outside":
        sent[16:24].view(np.uint64)[0] = pool.arena.handle.nbytes - 64
    good = True
    hostile(comm, sent)
    if WORLD.rank == 1:
        try:
            comm.Bcast(np.zeros(50_000, np.float32), 0, codec="int8")
            good = False
        except error:
            pass
    verdict(good)


def test_an_operation_that_fails_keeps_its_blocks(make):
    """A peer may be reading them still; so they are not used again."""
    if WORLD.size == 1:
        return
    comm = communicator()  # never freed: its messages are still on their way
    comm._programs = None  # the compiled engine's messages are not in such blocks
    pool = shared_memory.own_pool()
    n = 50_000
    comm.Allreduce(gaussian(n), np.zeros(n, np.float32), codec="int8")
    comm.timeout = 0.5
    WORLD.Barrier()  # all has been read
    lost: set[int] = set()
    if WORLD.rank == 0:
        earlier = {offset for offset in pool._sizes if pool.arena.memory[offset - 64]}
        request = comm.Iallreduce(gaussian(n), np.zeros(n, np.float32), codec="int8")
        with pytest.raises(CollectiveTimeoutError):
            request.wait()
        lost = {offset for offset in pool._sizes if pool.arena.memory[offset - 64]} - earlier
    WORLD.Barrier()
    fresh = make("none")
    for _ in range(5):
        x = gaussian(n)
        fresh.Allreduce(MPI.IN_PLACE, x, codec="int8")
        verdict(identical(x))
    verdict(all(pool.arena.memory[offset - 64] for offset in lost))
    verdict(WORLD.rank != 0 or bool(lost), "a block is lent")


def test_nothing_is_left_where_others_could_find_it(make):
    make("int8").Allreduce(MPI.IN_PLACE, gaussian(70_001))
    verdict(not [name for name in os.listdir("/dev/shm") if "hybridcomp" in name])
