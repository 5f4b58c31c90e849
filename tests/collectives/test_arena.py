from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridcomp.collectives.transport import arena as arenas
from hybridcomp.collectives.transport import shared_memory
from hybridcomp.collectives.transport.arena import LINE, ArenaHandle, ArenaPool, open_arena
from hybridcomp.collectives.transport.shared_memory import SharedMemoryPeers
from hybridcomp.errors import WireError

FIRST = 2 * LINE


@pytest.fixture
def pool() -> ArenaPool:
    return ArenaPool()


def pair() -> tuple[SharedMemoryPeers, SharedMemoryPeers]:
    """Return two ranks of one host, as each sees the other; here they are one process."""
    one, two = ArenaPool(), ArenaPool()
    return SharedMemoryPeers(one, {1: open_arena(two.arena.handle)}), SharedMemoryPeers(
        two, {0: open_arena(one.arena.handle)}
    )


def descriptor(token: int, offset: int, nbytes: int, magic: int = 0x01455948) -> np.ndarray:
    return np.frombuffer(struct.pack("<IIQQQ", magic, 0, token, offset, nbytes), np.uint8).copy()


def test_blocks_are_used_again(pool):
    sizes = [1, 4096, 4097, 100_000, 1 << 20]
    used = None
    for _ in range(5):
        taken = [pool.take(n) for n in sizes * 3]
        starts = sorted((arenas.address(b), b.size) for b in taken)
        assert all(at + n <= after - LINE for (at, n), (after, _) in itertools.pairwise(starts))
        assert [b.size for b in taken] == sizes * 3
        for b in taken:
            pool.give(b)
        used = used or pool.used
        assert pool.used == used


def test_a_stray_write_makes_no_readers_of_a_free_block(pool):
    block = pool.take(4096)
    pool.give(block)
    at = arenas.address(block) - pool.arena.start
    pool.arena.memory[at - LINE : at] = 63
    again = pool.take(4096)
    assert arenas.address(again) == arenas.address(block)
    assert not pool.unread(again)


def test_what_is_lent_waits_for_its_readers():
    mine, theirs = pair()
    message = mine.pool.take(5000)
    message[:] = 7
    sent = mine.publish(message[:4500], 2)
    got = theirs.read(sent)
    assert got.size == 4500
    assert np.all(got == 7)
    mine.pool.give(message)
    assert arenas.address(mine.pool.take(5000)) != arenas.address(message)
    theirs.release([got])
    assert mine.pool.unread(message)
    other = mine.pool.take(5000)
    theirs.release([got])
    assert not mine.pool.unread(message)
    assert arenas.address(mine.pool.take(5000)) == arenas.address(message)
    assert arenas.address(other) != arenas.address(message)


def test_what_was_read_is_lent_on_from_where_it_is():
    mine, theirs = pair()
    message = mine.pool.take(5000)
    message[:] = 3
    got = theirs.read(mine.publish(message, 1))
    back = mine.read(theirs.publish(got, 1))
    assert arenas.address(back) == arenas.address(message)
    mine.pool.give(message)
    theirs.release([got])
    assert mine.pool.unread(message)
    mine.release([back])
    assert not mine.pool.unread(message)


def test_memory_that_others_cannot_see_is_not_lent(monkeypatch):
    monkeypatch.setattr(arenas, "_MOST", 1 << 16)
    mine, _ = pair()
    taken = [mine.pool.take(4096) for _ in range(40)]
    seen = [mine.publish(b, 1) is not None for b in taken]
    assert seen == sorted(seen, reverse=True)
    assert 10 < sum(seen) < 16  # the others are the process's own memory
    outside = [b for b, inside in zip(taken, seen, strict=True) if not inside]
    for b in outside:
        mine.pool.give(b)
    again = mine.pool.take(4096)
    assert arenas.address(again) in map(arenas.address, outside)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 100),
        (LINE, 100),  # its lease would be the token
        (FIRST + 1, 100),
        (FIRST + LINE // 2, 100),
        (FIRST, 0),
        (FIRST, 1 << 63),
        (FIRST, 2**64 - 1),
        (2**64 - LINE, 100),
        (2**64 - LINE, 2**64 - 1),
        ("end", 1),
        ("end", LINE),
        ("past", 0),
    ],
)
def test_a_descriptor_of_what_cannot_be_is_refused(offset, nbytes):
    mine, theirs = pair()
    end = mine.pool.arena.handle.nbytes
    at = {"end": end, "past": end + LINE}.get(offset, offset)
    before = mine.pool.arena.memory[:FIRST].tobytes()
    with pytest.raises(WireError, match="a shared message of"):
        theirs.read(descriptor(mine.pool.arena.handle.token, at, nbytes))
    assert mine.pool.arena.memory[:FIRST].tobytes() == before


def test_a_descriptor_from_an_unknown_arena_is_refused():
    _, theirs = pair()
    for token in (0, 1, 2**64 - 1, ArenaPool().arena.handle.token):
        with pytest.raises(WireError, match="does not know"):
            theirs.read(descriptor(token, FIRST, 100))


def test_what_is_no_descriptor_is_a_message():
    mine, theirs = pair()
    assert theirs.read(np.zeros(32, np.uint8)) is None
    assert theirs.read(descriptor(mine.pool.arena.handle.token, FIRST, 100, magic=0x01435948)) is None


@pytest.mark.parametrize("wrong", ["token", "nbytes", "fd", "pid"])
def test_another_file_is_no_arena(pool, wrong):
    handle = pool.arena.handle
    with pytest.raises(OSError):  # noqa: PT011  (the system's, or ours)
        open_arena(handle._replace(**{wrong: 1 << 22 if wrong == "pid" else getattr(handle, wrong) + 12345}))


def test_a_process_of_another_namespace_is_taken_for_nobody(pool):
    """The handle's process number is that of a process here, which has some other file there."""
    handle = pool.arena.handle
    read, write = os.pipe()
    try:
        with pytest.raises(OSError, match="something else"):
            open_arena(handle._replace(fd=read))
    finally:
        os.close(read)
        os.close(write)
    fd = os.memfd_create("other")
    try:
        os.ftruncate(fd, handle.nbytes)
        with pytest.raises(OSError, match="something else"):
            open_arena(handle._replace(fd=fd))
    finally:
        os.close(fd)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fault", ["no memfd", "no call", "too large", "unmappable", "limited"])
def test_without_an_arena_messages_go_by_mpi(monkeypatch, fault):
    def fail(*_):
        raise OSError(errno.ENOSYS, "no")

    if fault == "no memfd":
        monkeypatch.delattr(os, "memfd_create")
    elif fault == "no call":
        monkeypatch.setattr(os, "memfd_create", fail)
    elif fault == "too large":
        monkeypatch.setattr(os, "ftruncate", fail)
    elif fault == "unmappable":
        monkeypatch.setattr(arenas.mmap, "mmap", fail)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 33, 1 << 33))
    before = _descriptors()
    assert shared_memory.own_pool.__wrapped__() is None
    assert _descriptors() == before


def test_blocks_beyond_what_is_kept_give_their_pages_back(monkeypatch):
    monkeypatch.setattr(arenas, "_KEPT", 1 << 20)
    pool = ArenaPool()
    file = pool.arena.handle.fd
    taken = [pool.take(1 << 20) for _ in range(8)]
    for b in taken:
        b[:] = 1
    full = os.fstat(file).st_blocks * 512
    assert full >= 8 << 20
    for b in taken:
        pool.give(b)
    assert os.fstat(file).st_blocks * 512 <= full - (6 << 20)
    used = pool.used
    again = [pool.take(1 << 20) for _ in range(8)]
    for b in again:
        b[:] = 2
    assert pool.used == used
    assert {arenas.address(b) for b in again} == {arenas.address(b) for b in taken}


def test_late_readers_are_noticed(monkeypatch):
    monkeypatch.setattr(arenas, "_MOST_LEASED", 10_000)
    mine, theirs = pair()
    lent = []
    for _ in range(4):
        assert not mine.pool.crowded
        message = mine.pool.take(4096)
        lent.append(theirs.read(mine.publish(message, 1)))
        mine.pool.give(message)
        if len(lent) == 3:
            assert mine.pool.crowded
            theirs.release([lent.pop()])
    theirs.release(lent)
    assert not mine.pool.crowded
    assert mine.pool.used == FIRST + 3 * 4096 + 2 * LINE


def test_the_arena_is_left_out_of_core_dumps(pool):
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{pool.arena.start:x}-"))
    flags = next(line for line in lines[start:] if line.startswith("VmFlags:"))
    assert re.search(r"\bdd\b", flags)


CHILD = """
import sys, time
from hybridcomp.collectives.transport.arena import ArenaPool
pool = ArenaPool()
pool.take(5000)[:] = 9
print(*pool.arena.handle, flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_behind():
    before = sorted(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        try:
            handle = ArenaHandle(*map(int, child.stdout.readline().split()))
            seen = open_arena(handle)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(30)
    assert np.all(seen.block(FIRST, 5000) == 9)  # a process that reads it still can
    with pytest.raises(OSError):  # noqa: PT011
        open_arena(handle)
    assert [
        name for name in sorted(os.listdir("/dev/shm")) if name not in before and "hybridcomp" in name
    ] == []


def test_a_forked_child_shares_but_does_not_end_it(pool):
    block = pool.take(5000)
    block[:] = 4
    child = os.fork()
    if child == 0:
        os._exit(0 if np.all(block == 4) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.all(block == 4)
    assert open_arena(pool.arena.handle).block(FIRST, 5000)[0] == 4
