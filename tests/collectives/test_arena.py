from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridcomp.collectives.engine import groups
from hybridcomp.collectives.transport import arena as arenas
from hybridcomp.collectives.transport.arena import Arena, ArenaHandle, make_arena, open_arena

FIRST = 128  # bytes of an arena that this file leaves alone: the token is there


@pytest.fixture
def arena() -> Arena:
    return make_arena()


@pytest.mark.parametrize("wrong", ["token", "nbytes", "fd", "pid"])
def test_another_file_is_no_arena(arena, wrong):
    handle = arena.handle
    with pytest.raises(OSError):  # noqa: PT011  (the system's, or ours)
        open_arena(handle._replace(**{wrong: 1 << 22 if wrong == "pid" else getattr(handle, wrong) + 12345}))


def test_a_process_of_another_namespace_is_taken_for_nobody(arena):
    """The handle's process number is that of a process here, which has some other file there."""
    handle = arena.handle
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
    assert groups._made_arena.__wrapped__() is None
    assert _descriptors() == before


def test_the_arena_is_left_out_of_core_dumps(arena):
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{arena.start:x}-"))
    flags = next(line for line in lines[start:] if line.startswith("VmFlags:"))
    assert re.search(r"\bdd\b", flags)


CHILD = """
import sys, time
from hybridcomp.collectives.transport.arena import make_arena
arena = make_arena()
arena.memory[128 : 128 + 5000] = 9
print(*arena.handle, flush=True)
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
    assert np.all(seen.memory[FIRST : FIRST + 5000] == 9)  # a process that reads it still can
    with pytest.raises(OSError):  # noqa: PT011
        open_arena(handle)
    assert [
        name for name in sorted(os.listdir("/dev/shm")) if name not in before and "hybridcomp" in name
    ] == []


def test_a_forked_child_shares_but_does_not_end_it(arena):
    block = arena.memory[FIRST : FIRST + 5000]
    block[:] = 4
    child = os.fork()
    if child == 0:
        os._exit(0 if np.all(block == 4) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.all(block == 4)
    assert open_arena(arena.handle).memory[FIRST] == 4
