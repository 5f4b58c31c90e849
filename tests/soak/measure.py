"""Resources that a process holds: memory, threads, requests, file descriptors, objects."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from mpi4py import MPI

from hybridcomp.collectives.execution.progress import engine

_SETTLE_SECONDS = 20.0


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: ``uordblks`` are bytes in use, ``hblkhd`` those in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@dataclass(frozen=True)
class Held:
    """Resources that a process holds at one time.

    Attributes:
        memory_mb: resident memory of its own, in MB.
        shared_mb: resident memory shared with ranks of this host, in MB.
        heap_mb: memory of the C heap in use, in MB, without what the heap keeps for later.
        threads: threads of Python.
        tasks: threads of the kernel's, those of libraries too; none of those that it lends io_uring, which come and go.
        files: open descriptors.
        requests: operations that have not ended, and those that were given up.
        groups: communicators whose failures are listened to.
        objects: objects that Python's garbage collector knows.
    """

    memory_mb: float
    shared_mb: float
    heap_mb: float
    threads: int
    tasks: int
    files: int
    requests: int
    groups: int
    objects: int

    def most(self, other: Held) -> Held:
        """Return the greater of each."""
        return Held(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(Held)))

    def beyond(self, other: Held) -> Held:
        """Return how much more than another."""
        return Held(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Held)))

    def leaks(self, allowed: Held) -> list[str]:
        """Return in words what is more here, where this is a growth, than is allowed."""
        return [
            f"{name} grew by {getattr(self, name):g}, allowed {most:g}"
            for name, most in vars(allowed).items()
            if getattr(self, name) > most
        ]


def held() -> Held:
    """Return what this process holds once operations that nobody waits for have ended, and garbage is gone.

    Objects that were frozen (:func:`gc.freeze`) are not counted.
    """
    running = engine()
    deadline = time.monotonic() + _SETTLE_SECONDS
    while running.active and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    heap = libc.mallinfo2()
    libc.malloc_trim(0)  # free memory is no leak
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Held(
        _megabytes(status["RssAnon"]),
        _megabytes(status["RssShmem"]),
        (heap.uordblks + heap.hblkhd) / 1e6,
        threading.active_count(),
        sum(not name.startswith("iou-wrk") for name in _tasks()),
        len(os.listdir("/proc/self/fd")),
        len(running.active) + len(running._abandoned),
        len(running._listening),
        len(gc.get_objects()),
    )


def everywhere(mine: Held) -> Held:
    """Return the most that any rank holds of each."""
    most = mine
    for other in MPI.COMM_WORLD.allgather(mine):
        most = most.most(other)
    return most


def _tasks() -> list[str]:
    names = []
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            names.append((path / "comm").read_text())
    return names


def _megabytes(text: str) -> float:
    number, unit = text.split()
    assert unit == "kB"
    return int(number) * 1024 / 1e6
