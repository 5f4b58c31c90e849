"""Provide mpi4py's probes, whose statuses tell what the receive will give.

Where a policy compresses sends, a status that is given tells the elements that were sent, and a message that was looked
into waits here for its receive (:mod:`~hybridcomp.collectives.data_path.unexpected`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from os import sched_yield
from time import monotonic, sleep
from typing import Any, Literal, Self, cast

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.buffers import parse
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.data_path.framing import encoded
from hybridcomp.collectives.data_path.unexpected import Drawn, Unexpected
from hybridcomp.collectives.datatypes import ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.failure.watchdog import inside_mpi, watched
from hybridcomp.collectives.operations import flat_p2p
from hybridcomp.collectives.packing import unpack
from hybridcomp.collectives.requests import Request, stored
from hybridcomp.collectives.session import HasSession, Session
from hybridcomp.errors import CollectiveTimeoutError, MismatchError

_POLL_SECONDS = 50e-6  # between polls for a message, once it is late


# -- methods of a communicator ---------------------------------------------------------------------------


def Probe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> Literal[True]:
    """Wait until a message is here; ``status`` tells what its receive will give."""
    session = comm.session
    with _watched(session):
        _poll(session, lambda: _probed(session, source, tag, status), source)
    return True


def Iprobe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> bool:
    """Tell whether a message is here; ``status`` tells what its receive will give."""
    progress.engine().check_process("probe")
    with _watched(comm.session):
        return _probed(comm.session, source, tag, status)


def Mprobe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> MPI.Message:
    """Wait until a message is here, and match it; ``Recv`` and ``Irecv`` of the result receive it."""
    session = comm.session
    with _watched(session):
        message: MPI.Message = _poll(session, lambda: _matched(session, source, tag, status), source)
    return message


def Improbe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> MPI.Message | None:
    """Match a message and return it as :meth:`Mprobe` does, if one is here."""
    progress.engine().check_process("probe")
    with _watched(comm.session):
        return _matched(comm.session, source, tag, status)


# -- of pickled messages, which may come after one that was looked into ---------------------------------


def probe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> Literal[True]:
    """Wait until a message is here, as mpi4py does."""
    session = comm.session
    return (
        session.p2p.probe(source, tag, status)
        if session.unexpected is None
        else Probe(comm, source, tag, status)
    )


def iprobe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> bool:
    """Tell whether a message is here, as mpi4py does."""
    session = comm.session
    return (
        session.p2p.iprobe(source, tag, status)
        if session.unexpected is None
        else Iprobe(comm, source, tag, status)
    )


def mprobe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> MPI.Message:
    """Wait until a message is here, and match it, as mpi4py does."""
    session = comm.session
    if session.unexpected is None:
        return session.p2p.mprobe(source, tag, status)
    with _watched(session):
        return _of_pickle(session, _poll(session, lambda: match(session, source, tag, status), source))


def improbe(
    comm: HasSession, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
) -> MPI.Message | None:
    """Match a message and return it, if one is here, as mpi4py does."""
    session = comm.session
    if session.unexpected is None:
        return session.p2p.improbe(source, tag, status)
    drawn = match(session, source, tag, status)
    return None if drawn is None else _of_pickle(session, drawn)


def recv(
    comm: HasSession,
    buf: Any = None,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    status: MPI.Status | None = None,
) -> Any:
    """Receive a pickled message, as mpi4py does."""
    message = _drawn_pickle(comm.session, source, tag)
    return comm.session.p2p.recv(buf, source, tag, status) if message is None else message.recv(status)


def irecv(
    comm: HasSession, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
) -> MPI.Request:
    """Start to receive a pickled message, as mpi4py does."""
    message = _drawn_pickle(comm.session, source, tag)
    return comm.session.p2p.irecv(buf, source, tag) if message is None else message.irecv()


def sendrecv(
    comm: HasSession,
    sendobj: Any,
    dest: int,
    sendtag: int = 0,
    recvbuf: Any = None,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
    status: MPI.Status | None = None,
) -> Any:
    """Send and receive pickled messages, as mpi4py does."""
    session = comm.session
    if session.unexpected is None:
        return session.p2p.sendrecv(sendobj, dest, sendtag, recvbuf, source, recvtag, status)
    sent = session.p2p.isend(sendobj, dest, sendtag)
    received = recv(comm, recvbuf, source, recvtag, status)
    sent.wait()
    return received


def _drawn_pickle(session: Session, source: int, tag: int) -> MPI.Message | None:
    """Take the message of a pickle's receive, if it is one of those that were looked into."""
    queue = session.unexpected
    if queue is None:
        return None
    with queue.lock:
        drawn = queue.first(source, tag)
        if drawn is None:
            return None
        queue.remove(drawn)
    return _of_pickle(session, drawn)


def _of_pickle(session: Session, drawn: Drawn) -> MPI.Message:
    drawn.fetch()  # mpi4py's message of a pickle has room for it, which no one can give
    return Message.of(session, drawn)


# -- where a probe has looked into messages ---------------------------------------------------------------


def _probed(session: Session, source: int, tag: int, status: MPI.Status | None) -> bool:
    """Tell whether a message is here, and fill ``status``."""
    if session.unexpected is not None:
        return session.unexpected.probe(source, tag, status)
    with inside_mpi():
        found = session.p2p.Iprobe(source, tag, status)
    if not found or status is None or not _encoded(session, status):
        return found
    return _queue(session).probe(source, tag, status)


def _matched(session: Session, source: int, tag: int, status: MPI.Status | None) -> MPI.Message | None:
    """Match a message, if one is here, and fill ``status``."""
    drawn = match(session, source, tag, status)
    if drawn is None:
        return None
    return Message.of(session, drawn) if drawn.message is None else drawn.message


def match(session: Session, source: int, tag: int, status: MPI.Status | None) -> Drawn | None:
    """Take a message, if one is here, and fill ``status``."""
    if session.unexpected is None:
        given = MPI.Status()
        with inside_mpi():
            if not session.p2p.Iprobe(source, tag, given):
                return None
            if not _encoded(session, given):
                message = session.p2p.Improbe(source, tag, given if status is None else status)
                return None if message is None else Drawn(message, given if status is None else status)
    return _queue(session).match(source, tag, status)


def _encoded(session: Session, status: MPI.Status) -> bool:
    """Tell whether a message may be encoded."""
    return session.compressed_from is not None and encoded(status.Get_count(MPI.BYTE))


def _queue(session: Session) -> Unexpected:
    if session.unexpected is None:
        session.unexpected = Unexpected(session.p2p)
    return session.unexpected


def _watched(session: Session) -> AbstractContextManager[Any]:
    if session.freed:
        raise session.gone("probe")
    return watched(f"probe on axis {session.axis!r}, rank {session.rank} of {session.size}", session.timeout)


def _poll(session: Session, ask: Callable[[], Any], source: int) -> Any:
    progress.engine().check_process("probe")
    began = monotonic()
    while True:
        for _ in range(20):
            found = ask()
            if found:
                return found
            sched_yield()
        if monotonic() - began > session.timeout:
            who = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
            raise CollectiveTimeoutError(
                f"probe on axis {session.axis!r}, rank {session.rank} of {session.size}: no message from {who} within "
                f"{session.timeout:g} s"
            )
        progress.engine().poll()
        sleep(_POLL_SECONDS)


# -- receives of messages that may have been looked into --------------------------------------------------


def start_receive(
    session: Session,
    buf: Any,
    source: int,
    tag: int,
    status: MPI.Status | None,
    post: Callable[[], progress.Request],
) -> progress.Request:
    """Start to receive a message that was looked into; if there is none, start a receive of one that MPI has, or will.

    Args:
        session: session of the communicator.
        buf: the caller's buffer.
        source, tag, status: arguments of the receive.
        post: function that starts a receive of MPI's.
    """
    queue = session.unexpected
    if queue is None:
        return posted_late(session, post(), buf, source, tag, status)
    with queue.lock:
        drawn = queue.first(source, tag)
        if drawn is None:
            return post()
        request = start_drawn(session, drawn, buf, status)
        queue.remove(drawn)
        return request


def post_receive(
    session: Session, buf: Any, source: int, tag: int, codec: CodecLike, status: MPI.Status | None
) -> progress.Request:
    """Start to receive a message that MPI has, or will have."""
    try:
        if source == MPI.PROC_NULL:
            raise ForeignBufferError("nobody sends it")
        flat = parse(buf, writable=True)
    except ForeignBufferError:
        nobody, post = source == MPI.PROC_NULL, session.p2p.Irecv
        return session.start_foreign(
            "recv",
            lambda: post(buf, source, tag),
            None if nobody else codec,
            transport=session.message_transport,
            peer=source,
            status=status,
        )
    return stored(flat_p2p.recv(session, flat, source, tag, codec, status), flat)


def posted_late(
    session: Session,
    request: progress.Request,
    buf: Any,
    source: int | None,
    tag: int,
    status: MPI.Status | None,
) -> progress.Request:
    """Return the request of a receive that MPI has, or of another one where its message is not MPI's any more."""
    if source is None or not takes_back(session, request):
        return request
    given = MPI.Status() if status is None else status
    return start_receive(
        session, buf, source, tag, given, lambda: post_receive(session, buf, source, tag, None, given)
    )


def takes_back(session: Session, request: progress.Request | Request) -> bool:
    """Take a receive back from MPI if another thread began to draw messages before MPI had it: look there first."""
    return session.unexpected is not None and not request.done and request.cancel()


def start_drawn(session: Session, drawn: Drawn, buf: Any, status: MPI.Status | None) -> progress.Request:
    """Start to receive a message that is no longer MPI's to match.

    Args:
        session: session of the communicator.
        drawn: the message.
        buf: the caller's buffer.
        status: status to fill.

    Raises:
        MismatchError: the message is compressed, and only MPI understands the buffer.
    """
    try:
        flat: Flat | None = parse(buf, writable=True)
    except ForeignBufferError:
        flat = None
    status = MPI.Status() if status is None else status
    if flat is not None:
        return stored(flat_p2p.recv_drawn(session, drawn, flat, status), flat)
    message = drawn.message
    if drawn.header() is not None:
        raise MismatchError(
            f"recv on axis {session.axis!r}, rank {session.rank} of {session.size}: rank {drawn.source} sent a message "
            f"of {drawn.nbytes} bytes that a buffer which only MPI understands cannot take"
        )
    request = session.start_foreign(
        "recv",
        lambda: unpack(drawn.buffer, buf) if message is None else message.Irecv(buf),
        transport=session.message_transport,
        peer=drawn.source,
        status=status,
    )
    if message is None:  # an odd number of bytes of the sender's own
        request.add_done_callback(lambda _: drawn.tell(status))
    return request


class AsBytes(list[Any]):
    """Buffer of bytes for MPI, which knows the buffer that the caller gave."""

    given: Any

    def of(self, given: Any) -> Self:
        """Note the caller's buffer."""
        self.given = given
        return self


class Message(MPI.Message):
    """Message that a probe has matched, and whose values are decoded from what was sent.

    To MPI it is a message from nobody until it is received. ``MPI.Message.Probe(comm)``, a function of MPI's own, makes
    no such message: ``Message.Probe(comm)`` does, and so does ``comm.Mprobe()``.
    """

    _session: Session | None = None
    _drawn: Drawn | None = None

    @classmethod
    def of(cls, session: Session, drawn: Drawn) -> Self:
        """Make the message that has been taken from MPI."""
        self = cls.__new__(cls, MPI.MESSAGE_NO_PROC)
        self._session, self._drawn = session, drawn
        return self

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receive the message, as ``Recv`` of its communicator does."""
        self._receive(buf, status).wait()

    def Irecv(self, buf: Any) -> Request:
        """Start :meth:`Recv`."""
        return Request(self._receive(buf, None))

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receive a pickled message."""
        _, drawn = self._held()
        self._session = self._drawn = None
        drawn.fetch().Wait()
        drawn.tell(status)
        return MPI.pickle.loads(drawn.buffer)

    def irecv(self) -> MPI.Request:
        """Start :meth:`recv`; the message is here."""
        return _Unpickled.of(self)

    def _receive(self, buf: Any, status: MPI.Status | None) -> progress.Request:
        session, drawn = self._held()
        request = start_drawn(session, drawn, buf, status)
        self._session = self._drawn = None
        return request

    def _held(self) -> tuple[Session, Drawn]:
        if self._session is None or self._drawn is None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        return self._session, self._drawn

    def __bool__(self) -> bool:
        return self._drawn is not None

    def __eq__(self, other: object) -> bool:
        if self._drawn is None:
            return bool(other == MPI.MESSAGE_NULL)
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def Probe(
        cls,
        comm: MPI.Comm,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Self:
        """Match a message as ``Mprobe`` of a communicator does."""
        return cast("Self", comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls,
        comm: MPI.Comm,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Self | None:
        """Match a message as ``Improbe`` of a communicator does."""
        return cast("Self | None", comm.Improbe(source, tag, status))


class _Unpickled(MPI.Request):
    """Request of a pickled message that is here."""

    _message: Message | None = None

    @classmethod
    def of(cls, message: Message) -> Self:
        self = cls.__new__(cls)
        self._message = message
        return self

    def wait(self, status: MPI.Status | None = None) -> Any:
        message, self._message = self._message, None
        return None if message is None else message.recv(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        return True, self.wait(status)
