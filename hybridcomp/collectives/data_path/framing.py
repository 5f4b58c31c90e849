"""Frame messages that callers send and receive.

Where a policy compresses sends on an axis, the receiver need not know which of them: an encoded message has an odd
number of bytes, one more than it needs if need be. That of the caller's own bytes, which travel as they are wherever
they are not compressed, is even: floating-point numbers have at least two.

A message's tag is the caller's, and MPI matches messages of one tag in the order in which they are posted: each
takes a ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from mpi4py import MPI

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import Codec
from hybridcomp.codecs.table import codec_for
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.data_path.links import Link, as_rows
from hybridcomp.collectives.execution.post_queue import PostTicket
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.errors import MismatchError

# Gives room for so many elements of a dtype.
Keep = Callable[[DType, int], Array]


def send_message(
    carrier: Carrier, data: Flat, dest: int, tag: int, mode: str, ticket: PostTicket, link: Link | None = None
) -> Steps:
    """Send ``data`` as one message of the carrier's codec, by MPI's ``mode`` (``"Isend"``, ``"Issend"``).

    With a ``link``, which is of host memory, the message makes up for what those before it lost.
    """
    t = _transport(carrier)
    mailbox = carrier.mailbox()
    message = carrier.encode_odd(as_rows(data), link)
    with t.keeping((mailbox, message)):
        request = yield from ticket.post(lambda: t.isend(message.wire(), dest, tag, mode), message.events)
        carrier.call.wire_bytes += message.wire().nbytes
        yield Pending([request], [dest], sends=True)
        carrier.release(message)
        yield from mailbox.finish()


def receive_message(
    carrier: Carrier, out: Flat, longest: int, source: int, tag: int, status: MPI.Status, ticket: PostTicket
) -> Steps:
    """Receive one message of at most ``out.size`` elements.

    Args:
        carrier: transport, where the sender sent it, and statistics; the codec is what the message says.
        out: the caller's buffer.
        longest: bytes of the longest message that the policy may make of ``out.size`` elements: :func:`room`.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: filled with the message's source and tag, and how many bytes its elements have.
        ticket: this operation's.

    Raises:
        WireError: damaged.
        MismatchError: another dtype, or more elements than fit.
    """
    t = _transport(carrier)
    mailbox = carrier.mailbox()
    message = mailbox.inbox(longest)
    with t.keeping(mailbox):
        request = yield from ticket.post(lambda: t.irecv(message.wire(), source, tag))
        yield Pending([request], [source], [status])
        message.peer = status.Get_source()
        nbytes = 0 if status.Is_cancelled() else status.Get_count(MPI.BYTE)
        if encoded(nbytes):
            yield mailbox.arrival([message])
        take_message(carrier, message, nbytes, out, status)
        yield from mailbox.finish()


def take_message(carrier: Carrier, message: Incoming, nbytes: int, out: Flat, status: MPI.Status) -> None:
    """Write what a received message means to the beginning of ``out``, and its elements' bytes to ``status``.

    Raises:
        WireError, MismatchError: as :func:`receive_message`.
    """
    if encoded(nbytes):
        taken = carrier.take(message, nbytes, out.data)
        status.Set_elements(MPI.BYTE, taken * out.dtype.itemsize)
    elif nbytes > out.nbytes:
        raise MismatchError(
            f"recv on axis {carrier.call.axis!r}: rank {carrier.transport.rank} has room for {out.nbytes} bytes, "
            f"rank {message.peer} sent {nbytes}"
        )
    elif nbytes:
        carrier.take_plain(message, nbytes, out.data)


def _transport(carrier: Carrier) -> MpiTransport:
    """Return the transport of messages that callers send and receive, which MPI alone carries."""
    assert isinstance(carrier.transport, MpiTransport)
    return carrier.transport


def room(codecs: Iterable[Codec], count: int, dtype: DType) -> int:
    """Return the bytes of the longest message that a sender of at most ``count`` elements may make."""
    return 1 + max(codec.bound(count, dtype) for codec in (NONE, *codecs))


def encoded(nbytes: int) -> bool:
    """Tell whether a message of floating-point numbers, of as many bytes, was made by a codec."""
    return nbytes % 2 == 1


class Arrival:
    """The event that a message of unknown length has arrived."""

    def __init__(self, comm: MPI.Comm, source: int, tag: int, status: MPI.Status) -> None:
        self._ask = (comm, source, tag, status)
        self.message: MPI.Message | None = None

    def done(self) -> bool:
        """Tell whether MPI has the beginning of the message."""
        comm, source, tag, status = self._ask
        if self.message is None:
            with inside_mpi():
                self.message = comm.Improbe(source, tag, status)
        return self.message is not None


def receive_array(
    carrier: Carrier, keep: Keep, most_bytes: int, source: int, tag: int, status: MPI.Status
) -> Steps:
    """Receive one framed message of any dtype and length.

    It takes no ticket: it cannot be posted before its message is here, and receives posted meanwhile come first.

    Args:
        carrier: transport and statistics; codec and dtype are what the message says.
        keep: called with the dtype and the number of elements once they are known; the array to decode to.
        most_bytes: a message whose own bytes or whose elements take more is refused.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: filled as by :func:`receive_message`.

    Raises:
        WireError: damaged, or not framed.
        MismatchError: larger than ``most_bytes``.
    """
    t = _transport(carrier)
    arrival = Arrival(t.comm, source, tag, status)
    yield Pending([], [], events=[arrival], source="a message")
    assert arrival.message is not None
    nbytes, peer = status.Get_count(MPI.BYTE), status.Get_source()
    # MPI has it: it needs room even to be refused. Open MPI 5 writes past the end of a buffer that is too small.
    buffer = np.empty(nbytes, np.uint8)
    with t.keeping(buffer):
        yield Pending([arrival.message.Irecv([buffer, MPI.BYTE])], [peer])
    who = f"recv_array on axis {carrier.call.axis!r}: rank {peer} sent"
    with carrier.call.decoding():
        size = decode_array(buffer, keep, most_bytes, who)
    carrier.call.raw_bytes = size
    status.Set_elements(MPI.BYTE, size)


def decode_array(buffer: ByteArray, keep: Keep, most_bytes: int, who: str) -> int:
    """Decode a message of which nothing is known; return the bytes of its elements.

    Args:
        buffer: what came, 1-D uint8.
        keep, most_bytes: as for :func:`receive_array`.
        who: the beginning of a sentence that names operation and peer, for errors.

    Raises:
        WireError: damaged, or not framed.
        MismatchError: larger than ``most_bytes``.
    """
    if buffer.size > most_bytes:
        raise MismatchError(
            f"{who} a message of {buffer.size} bytes, more than the {most_bytes} that are allowed"
        )
    raw, header = wire.open_message(buffer)
    size = header.count * header.dtype.itemsize
    if size > most_bytes:
        raise MismatchError(
            f"{who} {header.count} {header.dtype.label}, more than the {most_bytes} bytes that are allowed"
        )
    codec_for(header).decode_flat(raw, header, keep(header.dtype, header.count), header.dtype)
    return size
