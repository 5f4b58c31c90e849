"""Provide mpi4py's probes, whose statuses tell what the receive will give."""

from __future__ import annotations

import abc
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
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.failure.watchdog import inside_mpi, watched
from hybridcomp.collectives.operations import flat_p2p
from hybridcomp.collectives.operations.uncompressed import Uncompressed, stored
from hybridcomp.collectives.packing import unpack
from hybridcomp.collectives.requests import Request
from hybridcomp.errors import CollectiveTimeoutError, MismatchError

_POLL_SECONDS = 50e-6  # between polls for a message, once it is late


class Probes(Uncompressed):
    """Methods Probe, Mprobe and their kin.

    Where a policy compresses sends, a status that is given tells the elements that were sent, and a message that was
    looked into waits here for its receive (:mod:`~hybridcomp.collectives.data_path.unexpected`).
    """

    _unexpected: Unexpected | None = None  # once a probe has looked into an encoded message

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Literal[True]:
        """Wait until a message is here; ``status`` tells what its receive will give."""
        with self._watched():
            self._poll(lambda: self._probed(source, tag, status), source)
        return True

    def Iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Tell whether a message is here; ``status`` tells what its receive will give."""
        engine.engine().check_process("probe")
        with self._watched():
            return self._probed(source, tag, status)

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """Wait until a message is here, and match it; ``Recv`` and ``Irecv`` of the result receive it."""
        with self._watched():
            message: MPI.Message = self._poll(lambda: self._matched(source, tag, status), source)
        return message

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Match a message and return it as :meth:`Mprobe` does, if one is here."""
        engine.engine().check_process("probe")
        with self._watched():
            return self._matched(source, tag, status)

    # -- of pickled messages, which may come after one that was looked into -------------------------

    def probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Literal[True]:
        """Wait until a message is here, as mpi4py does."""
        return (
            super().probe(source, tag, status)
            if self._unexpected is None
            else self.Probe(source, tag, status)
        )

    def iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Tell whether a message is here, as mpi4py does."""
        return (
            super().iprobe(source, tag, status)
            if self._unexpected is None
            else self.Iprobe(source, tag, status)
        )

    def mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """Wait until a message is here, and match it, as mpi4py does."""
        if self._unexpected is None:
            return super().mprobe(source, tag, status)
        with self._watched():
            return self._of_pickle(self._poll(lambda: self._match(source, tag, status), source))

    def improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Match a message and return it, if one is here, as mpi4py does."""
        if self._unexpected is None:
            return super().improbe(source, tag, status)
        drawn = self._match(source, tag, status)
        return None if drawn is None else self._of_pickle(drawn)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Receive a pickled message, as mpi4py does."""
        message = self._drawn_pickle(source, tag)
        return super().recv(buf, source, tag, status) if message is None else message.recv(status)

    def irecv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Request:
        """Start to receive a pickled message, as mpi4py does."""
        message = self._drawn_pickle(source, tag)
        return super().irecv(buf, source, tag) if message is None else message.irecv()

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Send and receive pickled messages, as mpi4py does."""
        if self._unexpected is None:
            return super().sendrecv(sendobj, dest, sendtag, recvbuf, source, recvtag, status)
        sent = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        sent.wait()
        return received

    def _drawn_pickle(self, source: int, tag: int) -> MPI.Message | None:
        """Take the message of a pickle's receive, if it is one of those that were looked into."""
        queue = self._unexpected
        if queue is None:
            return None
        with queue.lock:
            drawn = queue.first(source, tag)
            if drawn is None:
                return None
            queue.remove(drawn)
        return self._of_pickle(drawn)

    def _of_pickle(self, drawn: Drawn) -> MPI.Message:
        drawn.fetch()  # mpi4py's message of a pickle has room for it, which no one can give
        return Message.of(self, drawn)

    # -- where a probe has looked into messages -------------------------------------------------------

    def _probed(self, source: int, tag: int, status: MPI.Status | None) -> bool:
        """Tell whether a message is here, and fill ``status``."""
        if self._unexpected is not None:
            return self._unexpected.probe(source, tag, status)
        with inside_mpi():
            found = self._p2p.Iprobe(source, tag, status)
        if not found or status is None or not self._encoded(status):
            return found
        return self._queue().probe(source, tag, status)

    def _matched(self, source: int, tag: int, status: MPI.Status | None) -> MPI.Message | None:
        """Match a message, if one is here, and fill ``status``."""
        drawn = self._match(source, tag, status)
        return None if drawn is None else self._as_message(drawn)

    def _match(self, source: int, tag: int, status: MPI.Status | None) -> Drawn | None:
        """Take a message, if one is here, and fill ``status``."""
        if self._unexpected is None:
            given = MPI.Status()
            with inside_mpi():
                if not self._p2p.Iprobe(source, tag, given):
                    return None
                if not self._encoded(given):
                    message = self._p2p.Improbe(source, tag, given if status is None else status)
                    return None if message is None else Drawn(message, given if status is None else status)
        return self._queue().match(source, tag, status)

    def _encoded(self, status: MPI.Status) -> bool:
        """Tell whether a message may be encoded."""
        return self._compressed_from is not None and encoded(status.Get_count(MPI.BYTE))

    def _queue(self) -> Unexpected:
        if self._unexpected is None:
            self._unexpected = Unexpected(self._p2p)
        return self._unexpected

    def _as_message(self, drawn: Drawn) -> MPI.Message:
        return Message.of(self, drawn) if drawn.message is None else drawn.message

    def _posted_late(
        self, request: engine.Request, buf: Any, source: int | None, tag: int, status: MPI.Status | None
    ) -> engine.Request:
        if source is None or not self._takes_back(request):
            return request
        return self.start_recv(buf, source, tag, None, status)

    def _takes_back(self, request: engine.Request | Request) -> bool:
        """Take a receive back from MPI if another thread began to draw messages before MPI had it: look there first."""
        return self._unexpected is not None and not request.done and request.cancel()

    @abc.abstractmethod
    def start_recv(
        self, buf: Any, source: int, tag: int, codec: CodecLike = None, status: MPI.Status | None = None
    ) -> engine.Request:
        """Start ``Irecv`` as an operation without an MPI request."""

    def _pass_later(
        self,
        op: str,
        post: Callable[..., MPI.Request],
        arguments: tuple[Any, ...],
        nbytes: int,
        peer: int | None,
        status: MPI.Status | None,
        copies: float,
    ) -> engine.Request:
        """Start one of MPI's own operations as a request of the engine."""
        request = super()._pass_later(op, post, arguments, nbytes, peer, status, copies)
        if op != "recv" or not isinstance(arguments[0], AsBytes):
            return request
        return self._posted_late(request, arguments[0].given, peer, arguments[2], status)

    def start_drawn(self, drawn: Drawn, buf: Any, status: MPI.Status | None) -> engine.Request:
        """Start to receive a message that is no longer MPI's to match.

        Args:
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
            return stored(flat_p2p.recv_drawn(self, drawn, flat, status), flat)
        message = drawn.message
        if drawn.header() is not None:
            raise MismatchError(
                f"recv on axis {self.axis!r}, rank {self.rank} of {self.size}: rank {drawn.source} sent a message of "
                f"{drawn.nbytes} bytes that a buffer which only MPI understands cannot take"
            )
        request = self._foreign(
            "recv",
            lambda: unpack(drawn.buffer, buf) if message is None else message.Irecv(buf),
            transport=self.message_transport,
            peer=drawn.source,
            status=status,
        )
        if message is None:  # an odd number of bytes of the sender's own
            request.add_done_callback(lambda _: drawn.tell(status))
        return request

    def _watched(self) -> AbstractContextManager[Any]:
        if self._freed:
            raise self._gone("probe")
        return watched(f"probe on axis {self.axis!r}, rank {self.rank} of {self.size}", self.timeout)

    def _poll(self, ask: Callable[[], Any], source: int) -> Any:
        engine.engine().check_process("probe")
        began = monotonic()
        while True:
            for _ in range(20):
                found = ask()
                if found:
                    return found
                sched_yield()
            if monotonic() - began > self.timeout:
                who = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
                raise CollectiveTimeoutError(
                    f"probe on axis {self.axis!r}, rank {self.rank} of {self.size}: no message from {who} within "
                    f"{self.timeout:g} s"
                )
            engine.engine().poll()
            sleep(_POLL_SECONDS)


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

    _comm: Probes | None = None
    _drawn: Drawn | None = None

    @classmethod
    def of(cls, comm: Probes, drawn: Drawn) -> Self:
        """Make the message that has been taken from MPI."""
        self = cls.__new__(cls, MPI.MESSAGE_NO_PROC)
        self._comm, self._drawn = comm, drawn
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
        self._comm = self._drawn = None
        drawn.fetch().Wait()
        drawn.tell(status)
        return MPI.pickle.loads(drawn.buffer)

    def irecv(self) -> MPI.Request:
        """Start :meth:`recv`; the message is here."""
        return _Unpickled.of(self)

    def _receive(self, buf: Any, status: MPI.Status | None) -> engine.Request:
        comm, drawn = self._held()
        request = comm.start_drawn(drawn, buf, status)
        self._comm = self._drawn = None
        return request

    def _held(self) -> tuple[Probes, Drawn]:
        if self._comm is None or self._drawn is None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        return self._comm, self._drawn

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
