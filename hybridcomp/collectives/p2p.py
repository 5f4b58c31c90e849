"""Send and receive.

Where a policy compresses sends on an axis, every float message there carries a header, so that the receiver
need not know what the sender chose; elsewhere the caller's bytes travel as they are.

A message's tag is the caller's, and MPI matches messages of one tag in the order in which they are posted: each
takes a turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.buffers import raw
from hybridcomp.collectives.carry import Carrier
from hybridcomp.collectives.engine import Pending, Ready, Steps
from hybridcomp.collectives.turns import Turn


def send_message(carrier: Carrier, data: Flat, dest: int, tag: int, turn: Turn) -> Steps:
    """Send ``data`` as one message of the carrier's codec."""
    t = carrier.transport
    mailbox = carrier.mailbox()
    message = carrier.encode(data.data)
    with t.keeping((mailbox, message)):
        request = yield from turn.post(
            lambda: t.comm.Isend([message.wire(), MPI.BYTE], dest, tag), message.events
        )
        carrier.call.wire_bytes += message.nbytes
        yield Pending([request], [dest])
        carrier.release(message)
        yield from mailbox.finish()


def receive_message(
    carrier: Carrier, out: Flat, capacity: int, source: int, tag: int, status: MPI.Status, turn: Turn
) -> Steps:
    """Receive one message of at most ``out.size`` elements.

    Args:
        carrier: transport, where the sender sent it, and statistics; the codec is what the message says.
        out: the caller's buffer.
        capacity: bytes of the largest message that the policy may make of ``out.size`` elements.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: filled with the message's source and tag.
        turn: this operation's.

    Raises:
        WireError: damaged.
        MismatchError: another dtype, or more elements than fit.
    """
    t = carrier.transport
    mailbox = carrier.mailbox()
    message = mailbox.inbox(capacity)
    with t.keeping(mailbox):
        request = yield from turn.post(lambda: t.comm.Irecv([message.wire(), MPI.BYTE], source, tag))
        yield Pending([request], [source], [status])
        message.peer = status.Get_source()
        if not status.Is_cancelled():
            yield mailbox.arrival([message])
            carrier.take(message, status.Get_count(MPI.BYTE), out.data)
        yield from mailbox.finish()


def send_bytes(comm: MPI.Comm, data: Flat, dest: int, tag: int, turn: Turn, events: Sequence[Ready]) -> Steps:
    """Send the caller's bytes as they are, after ``events``."""
    request = yield from turn.post(lambda: comm.Isend(raw(data), dest, tag), events)
    yield Pending([request], [dest])


def receive_bytes(
    comm: MPI.Comm, out: Flat, source: int, tag: int, status: MPI.Status, turn: Turn, events: Sequence[Ready]
) -> Steps:
    """Receive into the caller's buffer, after ``events``."""
    request = yield from turn.post(lambda: comm.Irecv(raw(out), source, tag), events)
    yield Pending([request], [source], [status])
