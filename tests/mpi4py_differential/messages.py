"""Messages from rank to rank: each method of sending with each of receiving and probing.

Each rank sends to the one ``shift`` after it, around (``pattern`` "ring") or to the last rank ("line", whose ends have
``PROC_NULL``), or rank 0 alone sends to the last ("pair").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi4py_differential.calls import Draw, Outcome, status_of, values
from tests.mpi4py_differential.memory import base_type
from tests.mpi4py_differential.spelling import Blocks, Buffer, build

SENDS = ["Send", "Ssend", "Bsend", "Rsend"]
RECEIVES = ["Recv", "Probe", "Mprobe"]
EXCHANGES = ["Sendrecv", "Sendrecv_replace"]


def peers(draw: Draw, rank: int) -> tuple[int | None, int | None]:
    """Return the ranks to send to and to receive from; None for no message."""
    size, shift = draw["ranks"], draw["shift"]
    if draw["pattern"] == "pair":
        first, last = draw["root"], (draw["root"] + 1 + shift % (size - 1)) % size
        return last if rank == first else None, first if rank == last else None
    to, source = rank + shift, rank - shift
    if draw["pattern"] == "ring":
        return to % size, source % size
    return to if to < size else MPI.PROC_NULL, source if source >= 0 else MPI.PROC_NULL


def _sent(draw: Draw, rank: int, j: int) -> int:
    """Return the elements of a rank's message number ``j``."""
    counts: list[int] = draw["counts"][rank]
    return counts[j]


def exchange(draw: Draw, comm: MPI.Intracomm) -> Outcome:
    """Make a call that sends and receives."""
    rank, outcome = MPI.COMM_WORLD.rank, Outcome()
    to, source = peers(draw, rank)
    assert to is not None
    assert source is not None
    base, status = base_type(draw["dtype"]), MPI.Status()
    n = _sent(draw, rank, 0)
    get = _sent(draw, source, 0) if source != MPI.PROC_NULL else 0
    tags: dict[str, Any] = {"sendtag": draw["tag"], "recvtag": MPI.ANY_TAG if draw["any"] else draw["tag"]}
    if draw["any"] and source != MPI.PROC_NULL:
        tags["source"] = MPI.ANY_SOURCE
    else:
        tags["source"] = source
    if draw["call"] == "Sendrecv_replace":
        room = max(n, get)
        buffer = _buffer(draw, "recv", rank, room, [values(draw, rank, 0, room)], sent=False)
        outcome.buffers = [buffer]
        # Both counts are the buffer's: all ranks have the same.
        arguments: dict[str, Any] = {"buf": buffer.message, "dest": to}
    else:
        send = _buffer(draw, "send", rank, n, [values(draw, rank, 0, n)], sent=True)
        recv = _buffer(draw, "recv", rank, get + draw["room"] * draw["unit"], [None], sent=False)
        outcome.buffers = [send, recv]
        arguments = {"sendbuf": send.message, "recvbuf": recv.message, "dest": to}
    outcome.before = [b.before for b in outcome.buffers]
    try:
        if draw["mode"] == "I":
            request = getattr(comm, "I" + draw["call"].lower())(**arguments, **tags)
            request.Wait()  # MPICH's own leaves the status as it was
        else:
            getattr(comm, draw["call"])(**arguments, **tags, status=status)
            outcome.statuses.append(status_of(status, base))
    except Exception as error:
        outcome.error = error
    outcome.after = [b.snapshot() for b in outcome.buffers]
    return outcome


def _buffer(
    draw: Draw, side: str, rank: int, n: int, data: list[np.ndarray | None], *, sent: bool, j: int = 0
) -> Buffer:
    refused = draw["refused"] if draw["refused_side"] == side else None
    spelling = {name: value + j for name, value in draw[side][rank].items()}
    return build(
        Blocks("simple", (n,), draw["unit"]), draw["dtype"], spelling, data, send=sent, refused=refused
    )


def messages(draw: Draw, comm: MPI.Intracomm) -> Outcome:
    """Send some messages on this rank, and receive some."""
    rank, outcome = MPI.COMM_WORLD.rank, Outcome()
    to, source = peers(draw, rank)
    count = len(draw["counts"][0])
    sends, receives = [], []
    for j in range(count):
        n = _sent(draw, rank, j)
        if to is not None:
            sends.append(_buffer(draw, "send", rank, n, [values(draw, rank, j, n)], sent=True, j=j))
        if source is not None:
            get = _sent(draw, source, j) if source != MPI.PROC_NULL else n
            room = 0 if draw["call"] != "Recv" else draw["room"] * draw["unit"]
            receives.append(_buffer(draw, "recv", rank, get + room, [None], sent=False, j=j))
    outcome.buffers = [*sends, *receives]
    outcome.before = [b.before for b in outcome.buffers]
    try:
        _run(draw, comm, to, source, sends, receives, outcome)
    except Exception as error:
        outcome.error = error
    outcome.after = [b.snapshot() for b in outcome.buffers]
    return outcome


def _run(
    draw: Draw,
    comm: MPI.Intracomm,
    to: int | None,
    source: int | None,
    sends: list[Buffer],
    receives: list[Buffer],
    outcome: Outcome,
) -> None:
    """Start what does not block, then do what does, then wait."""
    if draw["any"] and source not in (None, MPI.PROC_NULL):
        source, tag = MPI.ANY_SOURCE, MPI.ANY_TAG
    else:
        tag = draw["tag"]
    base = base_type(draw["dtype"])
    receive_first = draw["receive_mode"] in ("I", "_init") and draw["call"] == "Recv"

    def receive() -> Callable[[], None]:
        requests: list[tuple[Any, MPI.Status]] = []
        for buffer in receives:
            status = MPI.Status()
            if receive_first:
                name = "Irecv" if draw["receive_mode"] == "I" else "Recv_init"
                request = getattr(comm, name)(buffer.message, source, tag)
                if draw["receive_mode"] == "_init":
                    request.Start()
                requests.append((request, status))
                continue
            _receive_one(draw, comm, buffer, source, tag, status, base, outcome)
            outcome.statuses.append(status_of(status, base))

        def finish() -> None:
            for request, status in requests:
                request.Wait(status)
                # MPICH's own persistent receive from nobody says that it was from anybody.
                if source != MPI.PROC_NULL or draw["receive_mode"] != "_init":
                    outcome.statuses.append(status_of(status, base))
                if draw["receive_mode"] == "_init":
                    request.Free()

        return finish

    def send() -> Callable[[], None]:
        requests = []
        for buffer in sends:
            name = draw["sender"]
            if draw["mode"] == "I":
                requests.append(getattr(comm, "I" + name.lower())(buffer.message, to, draw["tag"]))
            elif draw["mode"] == "_init":
                requests.append(getattr(comm, name + "_init")(buffer.message, to, draw["tag"]))
                requests[-1].Start()
            else:
                getattr(comm, name)(buffer.message, to, draw["tag"])

        def finish() -> None:
            if draw["named"] and draw["mode"] == "I":
                MPI.Request.Waitall(requests)
                return
            for request in requests:
                request.Wait()
                if draw["mode"] == "_init":
                    request.Free()

        return finish

    ends = []
    for part in (receive, send) if receive_first else (send, receive):
        ends.append(part())
        if draw["sender"] == "Rsend" and part is receive:
            MPI.COMM_WORLD.Barrier()
    for end in ends:
        end()


def _receive_one(
    draw: Draw,
    comm: MPI.Intracomm,
    buffer: Buffer,
    source: int,
    tag: int,
    status: MPI.Status,
    base: MPI.Datatype,
    outcome: Outcome,
) -> None:
    """Receive a message by a blocking method, after a probe if the draw says so."""
    if draw["call"] == "Recv":
        comm.Recv(buffer.message, source, tag, status)
        return
    probed = MPI.Status()
    polls = draw["receive_mode"] == "I"
    if draw["call"] == "Probe":
        if polls:
            while not comm.Iprobe(source, tag, probed):
                pass
        else:
            comm.Probe(source, tag, probed)
        outcome.statuses.append(status_of(probed, base))
        comm.Recv(buffer.message, probed.source, probed.tag, status)
        return
    message = None
    if polls:
        while message is None:
            message = comm.Improbe(source, tag, probed)
    else:
        message = comm.Mprobe(source, tag, probed)
    outcome.statuses.append(status_of(probed, base))
    if draw["named"]:
        message.Irecv(buffer.message).Wait(status)
    else:
        message.Recv(buffer.message, status)
