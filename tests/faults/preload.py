"""Plant faults in a process's calls of the C library: compile ``libc.c``, and arm it from inside the process."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

from tests.faults.compiled import shared_library

SOURCE = Path(__file__).with_name("libc.c")
# As in libc.c.
ANSWERS = {"count": 0, "kill before": 1, "kill after": 2, "tear": 3, "fail once": 4, "fail from then on": 5}


def library() -> Path:
    """Return the library, compiled."""
    return shared_library(SOURCE)


class Planted:
    """The functions of ``libc.c`` in this process, which has it preloaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fault_files.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.fault_files.restype = None
        self._library.fault_memory.argtypes = [ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
        self._library.fault_memory.restype = None
        self._library.fault_threads.argtypes = [ctypes.c_long]
        self._library.fault_threads.restype = None
        for counter in ("fault_files_calls", "fault_memory_failed", "fault_threads_failed"):
            getattr(self._library, counter).restype = ctypes.c_long

    def files(self, folder: Path, number: int = -1, answer: str = "count", error: str = "ENOSPC") -> None:
        """Have the ``number``-th call (from 1) that changes something below a folder answered so."""
        path = str(folder.resolve()).encode()
        self._library.fault_files(path, number, ANSWERS[answer], getattr(errno, error))

    def file_calls(self) -> int:
        """Return how many calls there have been, and stop counting."""
        calls = int(self._library.fault_files_calls())
        self._library.fault_files(b"", -1, 0, 0)
        return calls

    def memory(self, least: int, succeed: int = 0, fail: int = 1 << 40) -> None:
        """Let so many allocations of at least so many bytes succeed, and then so many fail."""
        self._library.fault_memory(least, succeed, fail)

    def threads(self, number: int) -> None:
        """Let so many threads be started, and no more."""
        self._library.fault_threads(number)

    def disarm(self) -> tuple[int, int]:
        """Let everything succeed again; return how many allocations and how many threads have failed."""
        failed = int(self._library.fault_memory_failed()), int(self._library.fault_threads_failed())
        self._library.fault_memory(0, 0, 0)
        self._library.fault_threads(-1)
        return failed
