"""End the process where MPI does not come back past an operation's timeout: nothing can be reported from inside MPI.

MPICH (5.0.2, over TCP) may connect without end, in any call that sends, to a rank that has gone, or whose link was cut
for seconds. A thread of compiled code, which calls nothing of MPI's, looks at the operations in flight, and at the
calls of MPI that threads make for them. Where, look after look, an operation is late and a thread is inside MPI, the
process ends, with a message that names the operation. Separate threads (:mod:`.contact`, :mod:`.posting`), whose calls
no thread waits for, send first messages to a rank, and notices to ranks in trouble.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager
from typing import Any

from hybridcomp.native import kernels

BETWEEN_SECONDS, LOOKS = 1.0, 10  # seconds between looks, and looks that must see the same
# Name of an operation in error messages, put into words only if one is made: its kind and sequence number; the axis of
# its communicator, this rank, and the number of ranks.
Name = tuple[str, int, str, int, int]
_NAMED = "{} number {} on axis {!r}, rank {} of {}"


def in_words(what: str | Name) -> str:
    """Return a name in the words of error messages."""
    return what if isinstance(what, str) else _NAMED.format(*what)


def watch_process(who: str) -> None:
    """Start the thread, once; ``who`` names this process in the message."""
    kernels().watchdog_start(who, BETWEEN_SECONDS, LOOKS)


def watched(what: str | Name, seconds: float) -> AbstractContextManager[Any]:
    """Watch an operation that should end within ``seconds``, until the block ends or the result is dropped."""
    one: AbstractContextManager[Any] = kernels().WatchedOperation(time.monotonic() + seconds, what)
    return one


@functools.cache
def inside_mpi() -> AbstractContextManager[Any]:
    """Return a context manager for an MPI call that should come back at once; may be nested and shared by threads."""
    inside: AbstractContextManager[Any] = kernels().InsideMpi()
    return inside
