"""Frame messages that callers send and receive.

Where a policy compresses sends on an axis, the receiver need not know which of them: an encoded message has an odd
number of bytes, if necessary one more than it needs. Uncompressed messages, the caller's own bytes as they are, have an
even number: floating-point numbers have at least two bytes.

A message's tag is the caller's, and MPI matches messages of one tag in the order in which they are posted: each takes
a ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.errors import MismatchError

# Function that returns room for a number of elements of a dtype.
Keep = Callable[[DType, int], Array]


def send_message(
    carrier: Carrier, data: Flat, dest: int, tag: int, mode: str, ticket: PostTicket, link: Link | None = None
) -> Steps:
    """Send ``data`` as one message of the carrier's codec, by MPI's ``mode`` (``"Isend"``, ``"Issend"``).

    With a ``link``, whose data are in host memory, the message makes up for the losses of earlier ones.
    """
    t = _transport(carrier)
    mailbox = carrier.mailbox()
    message = carrier.encode_odd(as_rows(data), link)
    with t.keeping((mailbox, message)):
        request = yield from ticket.post(lambda: t.isend(message.wire(), dest, tag, mode), message.events)
        carrier.call.wire_bytes += message.wire().nbytes
        if t.away[dest]:
            carrier.call.between_bytes += message.wire().nbytes
        yield Pending([request], [dest], sends=True)
        carrier.release(message)
        yield from mailbox.finish()


def receive_message(
    carrier: Carrier, out: Flat, longest: int, source: int, tag: int, status: MPI.Status, ticket: PostTicket
) -> Steps:
    """Receive one message of at most ``out.size`` elements.

    Args:
        carrier: transport on which the sender sent it, and statistics; the message names its codec.
        out: buffer of the caller.
        longest: bytes of the longest message that the policy may make of ``out.size`` elements: :func:`room`.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: status to fill with the message's source and tag, and the bytes of its elements.
        ticket: ticket of this operation.

    Raises:
        WireError: the message is damaged.
        MismatchError: the message has another dtype, or more elements than fit.
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
    """Write the values of a received message to the beginning of ``out``, and their number of bytes to ``status``.

    Raises:
        WireError, MismatchError: as in :func:`receive_message`.
    """
    if out.dtype.is_float and encoded(nbytes):
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
    """Return the transport of callers' sends and receives, which MPI alone carries."""
    assert isinstance(carrier.transport, MpiTransport)
    return carrier.transport


def room(codecs: Iterable[Codec], count: int, dtype: DType) -> int:
    """Return the bytes of the longest message that a sender of at most ``count`` elements may make."""
    return 1 + max(codec.bound(count, dtype) for codec in (NONE, *codecs))


def encoded(nbytes: int) -> bool:
    """Tell whether a codec made a message of floating-point numbers that has ``nbytes`` bytes."""
    return nbytes % 2 == 1


def decode_array(buffer: ByteArray, keep: Keep, most_bytes: int, who: str) -> int:
    """Decode a message of unknown dtype and length; return the bytes of its elements.

    Args:
        buffer: bytes of the message, 1-D uint8.
        keep: function called with the dtype and the number of elements once they are known; returns the array to
            decode to.
        most_bytes: limit on the bytes of the message and of its elements.
        who: beginning of a sentence that names operation and peer, for errors.

    Raises:
        WireError: the message is damaged, or not framed.
        MismatchError: the message is larger than ``most_bytes``.
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
