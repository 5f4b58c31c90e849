"""Learn from rank 0's server which processes of the job have ended without a word.

Every rank keeps a connection to the server (:mod:`~hybridcomp.pmi.server`) that the system closes when its process
ends, however that happens. The server then tells all others, by a line on theirs.
"""

from __future__ import annotations

import os
import socket

from hybridcomp.native import extension

WORD = "life"  # in the place of the host's name, in the first line of such a connection
GREETING, BEGUN, GONE = b"alive\n", b"begun\n", "gone"
ENDED = "its process has ended"
_MOST_BYTES = 1 << 16

_connection: socket.socket | None = None
_lost: list[socket.socket] = []
_text = b""


def hold(connection: socket.socket) -> None:
    """Keep a connection that the server has greeted, to the end of this process."""
    global _connection  # noqa: PLW0603  (one per process by nature)
    _connection = connection
    connection.setblocking(False)
    os.register_at_fork(after_in_child=_forget)
    extension().end_without_mpi_after(connection.fileno())


def begin() -> None:
    """Tell the server that MPI has begun here: from then on a rank that is lost does not end the others."""
    if _connection is not None:
        _connection.sendall(BEGUN)


def _forget() -> None:
    """Close it in a forked child, which may outlive this process."""
    global _connection  # noqa: PLW0603
    if _connection is not None:
        _connection.close()
        _connection = None


def gone() -> dict[int, str]:
    """Return the ranks of the job of which the server has told since the last call, and what has become of them."""
    global _connection, _text  # noqa: PLW0603
    if _connection is None:
        return {}
    try:
        more = _connection.recv(_MOST_BYTES)
    except BlockingIOError:
        return {}
    except OSError:
        more = b""
    if not more:  # the server has ended; at this process's end, compiled code sees the same, so it stays open
        _lost.append(_connection)
        _connection = None
        return {}
    *lines, _text = (_text + more).split(b"\n")
    words = [line.decode("ascii", "replace").split(" ") for line in lines]
    return {int(rank): ENDED for what, rank in words if what == GONE and rank.isdecimal()}
