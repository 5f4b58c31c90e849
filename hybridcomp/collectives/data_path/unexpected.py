"""Keep the messages that a probe has looked into, until a receive takes them.

How many elements an encoded message has is in its header, which MPI shows no probe: a probe takes such a message from
MPI. Receives then look here first. MPI gives a receive the first message of a sender that fits, so what is here of a
sender came before all that MPI has of it: a probe takes the earlier ones of the sender along.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, Flat, byte_view
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.framing import Keep, decode_array, encoded, take_message
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.collectives.transport.mpi import raw
from hybridcomp.errors import WireError

# Function that takes a message from a rank with a tag, if one is here, and fills its status.
Match = Callable[[int, int, MPI.Status | None], "Drawn | None"]

_coming: set[Drawn] = set()  # whose bytes MPI may still write, whatever becomes of their communicator


class Drawn:
    """Message that has been taken from MPI's queue.

    Attributes:
        source, tag: rank that sent it, and its tag.
        nbytes: bytes on the wire.
        message: MPI's message; None once its bytes are being received.
        buffer: bytes of the message, which a codec may have made; empty while MPI has it.
    """

    def __init__(self, message: MPI.Message, status: MPI.Status) -> None:
        self.source, self.tag = status.Get_source(), status.Get_tag()
        self.nbytes: int = status.Get_count(MPI.BYTE)
        self.message: MPI.Message | None = message
        self.buffer: ByteArray = np.empty(0, np.uint8)
        self._request = MPI.REQUEST_NULL

    def fetch(self) -> MPI.Request:
        """Begin to receive the bytes, if that has not begun, and return MPI's request."""
        if self.message is not None:
            self.buffer = np.empty(self.nbytes, np.uint8)
            with inside_mpi():
                self._request = self.message.Irecv(raw(self.buffer))
            self.message = None
            _coming.add(self)
        return self._request

    def here(self) -> bool:
        """Tell whether all is known of the message that a status tells."""
        if self.message is not None and not encoded(self.nbytes):
            return True
        with inside_mpi():
            done: bool = self.fetch().Test()
        if done:
            _coming.discard(self)
        return done

    def arrival(self) -> Pending:
        """Return the condition to wait for until :attr:`buffer` has the bytes."""
        return Pending([self.fetch()], [self.source])

    def tell(self, status: MPI.Status | None) -> None:
        """Write to a status what the receive's will say: source, tag and the bytes of the elements."""
        if status is not None:
            status.Set_source(self.source)
            status.Set_tag(self.tag)
            status.Set_error(MPI.SUCCESS)
            status.Set_elements(MPI.BYTE, self._size())
            status.Set_cancelled(False)

    def header(self) -> wire.Header | None:
        """Return the header of an encoded message that is here; None for bytes of the sender's own, or damaged ones."""
        if self.message is not None or not encoded(self.nbytes):
            return None
        try:
            return wire.peek(self.buffer)
        except WireError:
            return None

    def _size(self) -> int:
        header = self.header()
        return self.nbytes if header is None else header.count * header.dtype.itemsize


class Unexpected:
    """Messages of a communicator that a probe has looked into, in the order in which they came.

    Attributes:
        lock: held from the look for a message here until a receive of MPI's is posted for it.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._drawn: list[Drawn] = []
        self.lock = threading.RLock()

    def first(self, source: int, tag: int) -> Drawn | None:
        """Return the first message that a receive from ``source`` with ``tag`` takes; None if none is here."""
        for one in self._drawn:
            if source in (one.source, MPI.ANY_SOURCE) and tag in (one.tag, MPI.ANY_TAG):
                return one
        return None

    def remove(self, message: Drawn) -> None:
        """Give a message to the receive that takes it."""
        self._drawn.remove(message)

    def probe(self, source: int, tag: int, status: MPI.Status | None) -> bool:
        """Tell whether a message is here, or MPI has one, and fill the status as its receive will."""
        with self.lock:
            found = self.first(source, tag)
            if found is None:
                given = MPI.Status() if status is None else status
                with inside_mpi():
                    if not self._comm.Iprobe(source, tag, given):
                        return False
                if not encoded(given.Get_count(MPI.BYTE)):
                    return True
                found = self._draw(given.Get_source(), given.Get_tag())
            if found is None or not found.here():
                return False
            found.tell(status)
            return True

    def match(self, source: int, tag: int, status: MPI.Status | None) -> Drawn | None:
        """Take the message that :meth:`probe` would find."""
        with self.lock:
            found = self.first(source, tag)
            if found is None:
                given = MPI.Status()
                with inside_mpi():
                    if not self._comm.Iprobe(source, tag, given):
                        return None
                    one = given.Get_source(), given.Get_tag()
                    if not encoded(given.Get_count(MPI.BYTE)):  # taken at once: no other is overtaken
                        message = self._comm.Improbe(*one, status)
                        return None if message is None else Drawn(message, given)
                found = self._draw(*one)
            if found is None or not found.here():
                return None
            self.remove(found)
            found.tell(status)
            return found

    def _draw(self, source: int, tag: int) -> Drawn | None:
        """Take all messages of a rank from MPI up to the first one with a tag; None if there is none by now."""
        while True:
            status = MPI.Status()
            with inside_mpi():
                message = self._comm.Improbe(source, MPI.ANY_TAG, status)
            if message is None:
                return None
            self._drawn.append(Drawn(message, status))
            if status.Get_tag() == tag:
                return self._drawn[-1]


def receive_drawn(carrier: Carrier, message: Drawn, out: Flat, status: MPI.Status) -> Steps:
    """Receive a message that a probe has looked into, or has matched, as :func:`.framing.receive_message` does.

    Raises:
        WireError: the message is damaged.
        MismatchError: the message has another dtype, or more elements than fit.
    """
    carrier.mailbox()
    if message.message is not None and message.nbytes <= out.nbytes and not encoded(message.nbytes):
        with carrier.transport.keeping(out):
            with inside_mpi():
                request, message.message = message.message.Irecv(raw(byte_view(out.data))), None
            yield Pending([request], [message.source], [status])
        return
    with carrier.transport.keeping(message):
        yield message.arrival()
    _coming.discard(message)
    message.tell(status)
    status.Set_elements(MPI.BYTE, message.nbytes)
    take_message(carrier, Incoming(message.source, message.buffer), message.nbytes, out, status)


class Arrival:
    """Event that a message of unknown length has arrived."""

    def __init__(self, match: Match, source: int, tag: int, status: MPI.Status) -> None:
        self._match = match
        self._ask = (source, tag, status)
        self.message: Drawn | None = None

    def done(self) -> bool:
        """Tell whether MPI has the beginning of the message."""
        if self.message is None:
            self.message = self._match(*self._ask)
        return self.message is not None


def receive_array(
    carrier: Carrier,
    keep: Keep,
    most_bytes: int,
    source: int,
    tag: int,
    status: MPI.Status,
    match: Match,
) -> Steps:
    """Receive one framed message of any dtype and length.

    The receive takes no ticket: it cannot be posted before its message is here, and receives posted meanwhile come
    first.

    Args:
        carrier: transport and statistics; the message names its codec and dtype.
        keep: function called with the dtype and the number of elements once they are known; returns the array to
            decode to.
        most_bytes: limit on the bytes of the message and of its elements; a larger message is refused.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: status to fill as :func:`receive_drawn` does.
        match: function that takes the message.

    Raises:
        WireError: the message is damaged, or not framed.
        MismatchError: the message is larger than ``most_bytes``.
    """
    arrival = Arrival(match, source, tag, status)
    yield Pending([], [], events=[arrival], source="a message")
    message = arrival.message
    assert message is not None
    # MPI has the message, which needs room even to be refused: Open MPI 5 writes past the end of a buffer that is too
    # small.
    with carrier.transport.keeping(message):
        yield message.arrival()
    who = f"recv_array on axis {carrier.call.axis!r}: rank {message.source} sent"
    with carrier.call.decoding():
        size = decode_array(message.buffer, keep, most_bytes, who)
    carrier.call.raw_bytes = size
    status.Set_elements(MPI.BYTE, size)
