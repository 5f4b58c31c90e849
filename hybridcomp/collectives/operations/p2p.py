"""Provide mpi4py's sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hybridcomp.collectives.buffers import ForeignBufferError, parse
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.memory import copied
from hybridcomp.collectives.operations import flat_p2p
from hybridcomp.collectives.operations.fast_path_cache import Key, Kind
from hybridcomp.collectives.operations.probes import Probes
from hybridcomp.collectives.requests import Request, wait_for

Buffer = Any

_MOST_BYTES = 1 << 32  # default limit on a message of unknown length


class PointToPoint(Probes):
    """Methods for sends and receives of a communicator, as in mpi4py.

    Where a policy compresses sends on an axis, both ends must be communicators of this package.
    """

    # -- sends ---------------------------------------------------------------------------------------

    def Send(
        self,
        buf: Buffer,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Send to ``dest``. With ``codec=``, the receiver must give the same codec."""
        if dest in self._met and self._sent(
            ("send", 0, name, phase, codec), self._single, buf, dest, tag, None
        ):
            return
        return self.start_send(buf, dest, tag, name, phase, codec, "Isend").wait()

    def Isend(
        self,
        buf: Buffer,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Send`; returns at once. The buffer must stay unchanged until the request is done."""
        return Request(self.start_send(buf, dest, tag, name, phase, codec, "Isend"))

    def Ssend(self, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
        """Send as :meth:`Send` does, and wait until the receive has begun."""
        self.Issend(buf, dest, tag, **ours).wait()

    def Issend(
        self,
        buf: Buffer,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Ssend`."""
        return Request(self.start_send(buf, dest, tag, name, phase, codec, "Issend"))

    def Rsend(self, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
        """Send as :meth:`Send` does, where the receive has been started."""
        self.Irsend(buf, dest, tag, **ours).wait()

    def Irsend(
        self,
        buf: Buffer,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Rsend`."""
        return Request(self.start_send(buf, dest, tag, name, phase, codec, "Irsend"))

    def Bsend(self, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
        """Send as :meth:`Send` does, through the buffer attached to MPI; compressed data are in a separate buffer."""
        self.Ibsend(buf, dest, tag, **ours)

    def Ibsend(
        self,
        buf: Buffer,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Bsend`."""
        return Request(self.start_send(buf, dest, tag, name, phase, codec, "Ibsend"))

    def start_send(
        self,
        buf: Buffer,
        dest: int,
        tag: int,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        mode: str = "Isend",
    ) -> engine.Request:
        """Start :meth:`Isend` as an operation without an MPI request."""
        if mode == "Isend" and dest in self._met:
            key = ("send", 0, name, phase, codec)
            request = self._begun(key, self._single, (buf, dest, tag), None, dest)
            if request is not None:
                return request
        try:
            if dest == MPI.PROC_NULL:
                raise ForeignBufferError("nobody gets it")
            flat = parse(buf)
        except ForeignBufferError:
            post = getattr(self._p2p, mode)
            nobody = dest == MPI.PROC_NULL
            return self._foreign_message(
                "send",
                lambda: self._p2p_transport.start(dest, lambda: post(buf, dest, tag)),
                dest,
                None if nobody else codec,
            )
        return flat_p2p.send(self, flat, dest, tag, name, phase, codec, mode=mode)

    # -- receives ------------------------------------------------------------------------------------

    def Recv(
        self,
        buf: Buffer,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        codec: CodecLike = None,
    ) -> None:
        """Receive into ``buf``, which may be larger than the message.

        ``status`` is filled with source, tag and count of the sent elements, before any compression.
        """
        if self._sent(("recv", 0, None, None, codec), self._single, buf, source, tag, status):
            return
        return self.start_recv(buf, source, tag, codec, status).wait()

    def Irecv(
        self, buf: Buffer, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, codec: CodecLike = None
    ) -> Request:
        """Start :meth:`Recv`; returns at once."""
        return Request(self.start_recv(buf, source, tag, codec, None))

    def start_recv(
        self, buf: Buffer, source: int, tag: int, codec: CodecLike = None, status: MPI.Status | None = None
    ) -> engine.Request:
        """Start :meth:`Irecv` as an operation without an MPI request."""
        status = MPI.Status() if status is None else status
        if self._may_receive(source):
            # Whatever the size: the waiting caller may not learn whether compressed data came.
            key = ("recv", 1, None, None, codec)
            request = self._begun(key, self._single, (buf, source, tag), None, source, status)
            if request is not None:
                return request
        try:
            if source == MPI.PROC_NULL:
                raise ForeignBufferError("nobody sends it")
            flat = parse(buf, writable=True)
        except ForeignBufferError:
            nobody = source == MPI.PROC_NULL
            return self._foreign_message(
                "recv",
                lambda: self._p2p.Irecv(buf, source, tag),
                source,
                None if nobody else codec,
                status,
            )
        return flat_p2p.recv(self, flat, source, tag, codec, status)

    # -- both ----------------------------------------------------------------------------------------

    def Sendrecv(
        self,
        sendbuf: Buffer,
        dest: int,
        sendtag: int = 0,
        recvbuf: Buffer = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Send to one rank and receive from another; neither waits for the other's end."""
        if (
            dest in self._met
            and self._may_receive(source)
            and self._exchanged(
                (("send", 0, name, phase, codec), ("recv", 0, None, None, codec)),
                self._single,
                (sendbuf, dest, sendtag),
                (recvbuf, source, recvtag),
                status,
            )
        ):
            return
        received = self.start_recv(recvbuf, source, recvtag, codec, status)
        wait_for([received, self.start_send(sendbuf, dest, sendtag, name, phase, codec, "Isend")], None)

    def Isendrecv(
        self,
        sendbuf: Buffer,
        dest: int,
        sendtag: int = 0,
        recvbuf: Buffer = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Sendrecv`."""
        received = self.start_recv(recvbuf, source, recvtag, codec, None)
        return Request(self.start_send(sendbuf, dest, sendtag, name, phase, codec, "Isend"), received)

    def Sendrecv_replace(
        self,
        buf: Buffer,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        codec: CodecLike = None,
    ) -> None:
        """Send the content of ``buf``, and receive into it."""
        wait_for(self._sendrecv_replace(buf, dest, sendtag, source, recvtag, codec, status), None)

    def Isendrecv_replace(
        self,
        buf: Buffer,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        *,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Sendrecv_replace`."""
        return Request(*self._sendrecv_replace(buf, dest, sendtag, source, recvtag, codec, None))

    def _sendrecv_replace(
        self,
        buf: Buffer,
        dest: int,
        sendtag: int,
        source: int,
        recvtag: int,
        codec: CodecLike,
        status: MPI.Status | None,
    ) -> list[engine.Request]:
        try:
            if MPI.PROC_NULL in (dest, source):
                raise ForeignBufferError("one of the two is nobody")
            flat = parse(buf, writable=True)
        except ForeignBufferError:
            status = MPI.Status() if status is None else status
            return [
                self._foreign_message(
                    "send",
                    lambda: self._p2p.Isendrecv_replace(buf, dest, sendtag, source, recvtag),
                    source,
                    codec,
                    status,
                )
            ]
        sent = flat_p2p.send(self, copied(flat), dest, sendtag, None, None, codec)
        return [sent, flat_p2p.recv(self, flat, source, recvtag, codec, status)]

    # -- arrays whose length the receiver does not know ----------------------------------------------

    def Send_array(self, array: Any, dest: int, tag: int = 0, **ours: Any) -> None:
        """Send an array of a dtype that codecs carry for :meth:`Recv_array`; compressed where the policy says so."""
        self.Isend_array(array, dest, tag, **ours).wait()

    def Isend_array(
        self,
        array: Any,
        dest: int,
        tag: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Send_array`."""
        return Request(flat_p2p.send(self, parse(array), dest, tag, name, phase, codec, frame=True))

    def Recv_array(
        self,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        most_bytes: int = _MOST_BYTES,
    ) -> Any:
        """Receive an array that :meth:`Send_array` sent, without knowing its length, dtype or codec.

        Args:
            source, tag: as in MPI. A receive started meanwhile that fits the message, too, may get it first.
            status: status to fill as :meth:`Recv` does.
            most_bytes: limit on the array's bytes; a larger array is refused.

        Returns:
            A new one-dimensional NumPy array.

        Raises:
            WireError: the message is damaged, or was sent by another method.
            MismatchError: the array is larger than ``most_bytes``.
        """
        request, arrays = flat_p2p.recv_array(self, source, tag, most_bytes, status)
        request.wait()
        return arrays[0]

    # -- shared by sends and receives ----------------------------------------------------------------

    def _foreign_message(
        self,
        op: str,
        post: Callable[[], MPI.Request],
        peer: int,
        codec: CodecLike,
        status: MPI.Status | None = None,
    ) -> engine.Request:
        return self._foreign(op, post, codec, transport=self._p2p_transport, peer=peer, status=status)

    def _may_receive(self, source: int) -> bool:
        return source == MPI.ANY_SOURCE or 0 <= source < self.size

    def _single(self, key: Key, buf: Any, _: Any, __: Any) -> Kind | None:
        """Return the kind of a send or receive of a plain array; None if it must take the usual way."""
        what, of_any_size, name, phase, codec = key
        try:
            flat = parse(buf)
        except ForeignBufferError:
            return None
        if flat.dtype.is_float and flat.dtype.itemsize == 2:
            return None
        arguments = [0, flat.nbytes, MPI.BYTE.handle, 0, 0, self._p2p.handle]
        programs = self._message_programs
        if what == "recv":
            call = self._plain_call("recv", flat.nbytes, 0)
            # The policy compresses no message that fits a smaller buffer.
            least = self._compressed_from if codec is None and not of_any_size else 0
            if least is None or flat.nbytes < least or not flat_p2p.may_be_encoded(self, flat.dtype, codec):
                return call, arguments
            program = programs and programs.recv(flat_p2p.codecs_of(self, codec), flat.dtype, flat.size)
        else:
            choice = flat_p2p.choose_send(self, flat, name, phase, codec)
            call = self._call("send", choice, flat.nbytes, flat.nbytes)
            if not choice.compresses:
                return call, arguments
            if choice.feedback is not None:  # feedback depends on the caller's place in a model
                return None
            program = programs and programs.send(choice.codec, flat.dtype, flat.size)
        return None if program is None else (call, program)
