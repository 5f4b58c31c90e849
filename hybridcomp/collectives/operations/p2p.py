"""Provide mpi4py's sends and receives.

Where a policy compresses sends on an axis, both ends must be communicators of this package.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import is_torch
from hybridcomp.collectives.buffers import Spec, check, datatype_of, in_memory, parse, units
from hybridcomp.collectives.choices import NO_OPTIONS, CodecLike, OperationOptions
from hybridcomp.collectives.datatypes import BY_HANDLE, ForeignBufferError
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.fast_path_cache import Key, Kind
from hybridcomp.collectives.memory import copied
from hybridcomp.collectives.operations import flat_p2p
from hybridcomp.collectives.operations.probes import (
    AsBytes,
    match,
    post_receive,
    start_receive,
    takes_back,
)
from hybridcomp.collectives.operations.uncompressed import Operates
from hybridcomp.collectives.requests import Request, stored, wait_for
from hybridcomp.collectives.session import Session

Buffer = Any

_MOST_BYTES = 1 << 32  # default limit on a message of unknown length


# -- sends -----------------------------------------------------------------------------------------------


def Send(
    comm: Operates,
    buf: Buffer,
    dest: int,
    tag: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> None:
    """Send to ``dest``. With ``codec=``, the receiver must give the same codec."""
    if dest in comm.fast_path.met and comm.fast_path.sent(
        ("send", 0, name, phase, codec), _single, buf, dest, tag, None
    ):
        return
    if (nbytes := comm.pass_through.passes("send", codec, buf)) >= 0:
        return comm.pass_through.run("send", comm.session.p2p.Isend, (buf, dest, tag), nbytes, 1, dest)
    return start_send(comm, buf, dest, tag, OperationOptions(name, phase, codec), "Isend").wait()


def Isend(
    comm: Operates,
    buf: Buffer,
    dest: int,
    tag: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Send`; returns at once. The buffer must stay unchanged until the request is done."""
    if codec is None and (sends := comm.pass_through.sends) is not None:
        request: Request | None = sends.begin(comm.session, buf, dest, tag)
        if request is not None:
            return request
    if (nbytes := comm.pass_through.passes("send", codec, buf)) >= 0:
        return comm.pass_through.begin("send", comm.session.p2p.Isend, (buf, dest, tag), nbytes, 1, dest)
    return Request(start_send(comm, buf, dest, tag, OperationOptions(name, phase, codec), "Isend"))


def Ssend(comm: Operates, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
    """Send as :meth:`Send` does, and wait until the receive has begun."""
    Issend(comm, buf, dest, tag, **ours).wait()


def Issend(
    comm: Operates,
    buf: Buffer,
    dest: int,
    tag: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Ssend`."""
    if (nbytes := comm.pass_through.passes("send", codec, buf)) >= 0:
        return comm.pass_through.begin("send", comm.session.p2p.Issend, (buf, dest, tag), nbytes, 1, dest)
    return Request(start_send(comm, buf, dest, tag, OperationOptions(name, phase, codec), "Issend"))


def Rsend(comm: Operates, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
    """Send as :meth:`Send` does, where the receive has been started."""
    Irsend(comm, buf, dest, tag, **ours).wait()


def Irsend(
    comm: Operates,
    buf: Buffer,
    dest: int,
    tag: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Rsend`."""
    if (nbytes := comm.pass_through.passes("send", codec, buf)) >= 0:
        return comm.pass_through.begin("send", comm.session.p2p.Irsend, (buf, dest, tag), nbytes, 1, dest)
    return Request(start_send(comm, buf, dest, tag, OperationOptions(name, phase, codec), "Irsend"))


def Bsend(comm: Operates, buf: Buffer, dest: int, tag: int = 0, **ours: Any) -> None:
    """Send as :meth:`Send` does, through the buffer attached to MPI; compressed data are in a separate buffer."""
    Ibsend(comm, buf, dest, tag, **ours)


def Ibsend(
    comm: Operates,
    buf: Buffer,
    dest: int,
    tag: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Bsend`."""
    if (nbytes := comm.pass_through.passes("send", codec, buf)) >= 0:
        return comm.pass_through.begin("send", comm.session.p2p.Ibsend, (buf, dest, tag), nbytes, 1, dest)
    return Request(start_send(comm, buf, dest, tag, OperationOptions(name, phase, codec), "Ibsend"))


def start_send(
    comm: Operates,
    buf: Buffer,
    dest: int,
    tag: int,
    options: OperationOptions = NO_OPTIONS,
    mode: str = "Isend",
) -> progress.Request:
    """Start :meth:`Isend` as an operation without an MPI request."""
    if mode == "Isend" and dest in comm.fast_path.met:
        key = ("send", 0, *options[:-1])
        request = comm.fast_path.begun(key, _single, (buf, dest, tag), None, dest)
        if request is not None:
            return request
    try:
        if dest == MPI.PROC_NULL:
            raise ForeignBufferError("nobody gets it")
        flat = parse(buf)
    except ForeignBufferError:
        post = getattr(comm.session.p2p, mode)
        nobody = dest == MPI.PROC_NULL
        t = comm.session.message_transport
        return comm.session.start_foreign(
            "send",
            lambda: t.start(dest, lambda: post(buf, dest, tag)),
            None if nobody else options.codec,
            transport=t,
            peer=dest,
        )
    return flat_p2p.send(comm.session, flat, dest, tag, options, mode=mode)


# -- receives --------------------------------------------------------------------------------------------


def Recv(
    comm: Operates,
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
    if comm.session.unexpected is None:
        if comm.fast_path.sent(("recv", 0, None, None, codec), _single, buf, source, tag, status):
            return
        if (nbytes := comm.pass_through.passes("recv", codec, buf)) >= 0:
            return _recv_by_mpi(comm, buf, nbytes, source, tag, status)
    return start_recv(comm, buf, source, tag, codec, status).wait()


def Irecv(
    comm: Operates,
    buf: Buffer,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    *,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Recv`; returns at once."""
    if codec is None and (receives := comm.pass_through.receives) is not None:
        begun: Request | None = receives.begin(comm.session, buf, source, tag)
        if begun is not None:
            return begun
    if comm.session.unexpected is None and (nbytes := comm.pass_through.passes("recv", codec, buf)) >= 0:
        arguments = (_as_bytes(comm, buf, nbytes), source, tag)
        request = comm.pass_through.begin("recv", comm.session.p2p.Irecv, arguments, nbytes, 0, source)
        return Request(start_recv(comm, buf, source, tag)) if takes_back(comm.session, request) else request
    return Request(start_recv(comm, buf, source, tag, codec, None))


def _recv_by_mpi(
    comm: Operates, buf: Buffer, nbytes: int, source: int, tag: int, status: MPI.Status | None
) -> None:
    """Receive by MPI's own operation; a larger message that was compressed may fit the buffer."""
    if comm.session.compressed_from is not None and status is None:
        status = MPI.Status()
    arguments = (_as_bytes(comm, buf, nbytes), source, tag)
    comm.pass_through.run("recv", comm.session.p2p.Irecv, arguments, nbytes, 0, source, status)
    if comm.session.compressed_from is not None:
        comm.fast_path.check_plain(buf, status)


def _as_bytes(comm: Operates, buf: Buffer, nbytes: int) -> Buffer:
    """Return a buffer as bytes where encoded messages may come, of which MPICH takes no part of an element."""
    if comm.session.compressed_from is None or comm.session.size == 1:
        return buf
    data, count, displacement, _ = Spec.of(buf)
    datatype = datatype_of(buf) if displacement is not None else None
    if datatype is None or count is None:
        return AsBytes([data, nbytes, MPI.BYTE]).of(buf)
    nbytes, begin = (operator.index(one) * datatype.extent for one in (count, displacement or 0))
    return AsBytes([data, (nbytes, begin), MPI.BYTE]).of(buf)


def start_recv(
    comm: Operates,
    buf: Buffer,
    source: int,
    tag: int,
    codec: CodecLike = None,
    status: MPI.Status | None = None,
) -> progress.Request:
    """Start :meth:`Irecv` as an operation without an MPI request."""
    session, given = comm.session, MPI.Status() if status is None else status

    def post() -> progress.Request:
        if _may_receive(session, source):
            # Whatever the size: the waiting caller may not learn whether compressed data came.
            key = ("recv", 1, None, None, codec)
            request = comm.fast_path.begun(key, _single, (buf, source, tag), None, source, given)
            if request is not None:
                return request
        return post_receive(session, buf, source, tag, codec, given)

    return start_receive(session, buf, source, tag, given, post)


# -- both ------------------------------------------------------------------------------------------------


def Sendrecv(
    comm: Operates,
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
        comm.session.unexpected is None
        and dest in comm.fast_path.met
        and _may_receive(comm.session, source)
        and comm.fast_path.exchanged(
            (("send", 0, name, phase, codec), ("recv", 0, None, None, codec)),
            _single,
            (sendbuf, dest, sendtag),
            (recvbuf, source, recvtag),
            status,
        )
    ):
        return
    if comm.pass_through.is_mpis("send", codec) and _exchanged_by_mpi(
        comm, (sendbuf, dest, sendtag), (recvbuf, source, recvtag), status
    ):
        return
    check_buffers(sendbuf, dest, recvbuf, source)
    receive = start_recv(comm, recvbuf, source, recvtag, codec, status)
    wait_for(
        [receive, start_send(comm, sendbuf, dest, sendtag, OperationOptions(name, phase, codec), "Isend")],
        None,
    )


def _exchanged_by_mpi(
    comm: Operates, outgoing: tuple[Any, int, int], incoming: tuple[Any, int, int], status: MPI.Status | None
) -> bool:
    """Send and receive by MPI's own operations; False where mpi4py does not read a buffer."""
    passing = comm.pass_through
    sent, received = passing.passes("send", None, outgoing[0]), passing.passes("recv", None, incoming[0])
    if sent < 0 or received < 0:
        return False
    p2p = comm.session.p2p
    p2p.Recv_init(*incoming).Free()  # raises MPI's errors, before a receive is posted that would stay
    p2p.Send_init(*outgoing).Free()
    request = passing.begin("recv", p2p.Irecv, incoming, received, 0, incoming[1])
    passing.run("send", p2p.Isend, outgoing, sent, 1, outgoing[1])
    request.Wait(status)
    return True


def Isendrecv(
    comm: Operates,
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
    check_buffers(sendbuf, dest, recvbuf, source)
    receive = start_recv(comm, recvbuf, source, recvtag, codec, None)
    return Request(
        start_send(comm, sendbuf, dest, sendtag, OperationOptions(name, phase, codec), "Isend"), receive
    )


def Sendrecv_replace(
    comm: Operates,
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
    wait_for(_sendrecv_replace(comm, buf, dest, sendtag, source, recvtag, codec, status), None)


def Isendrecv_replace(
    comm: Operates,
    buf: Buffer,
    dest: int,
    sendtag: int = 0,
    source: int = MPI.ANY_SOURCE,
    recvtag: int = MPI.ANY_TAG,
    *,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Sendrecv_replace`."""
    return Request(*_sendrecv_replace(comm, buf, dest, sendtag, source, recvtag, codec, None))


def _sendrecv_replace(
    comm: Operates,
    buf: Buffer,
    dest: int,
    sendtag: int,
    source: int,
    recvtag: int,
    codec: CodecLike,
    status: MPI.Status | None,
) -> list[progress.Request]:
    if comm.session.unexpected is not None and dest == MPI.PROC_NULL:
        return [start_recv(comm, buf, source, recvtag, codec, status)]
    try:
        flat = None if MPI.PROC_NULL in (dest, source) else parse(buf, writable=True)
    except ForeignBufferError:
        # MPICH's own Isendrecv_replace takes no datatypes with gaps.
        sent = start_send(comm, _copied_memory(buf), dest, sendtag, OperationOptions(codec=codec))
        return [sent, start_recv(comm, buf, source, recvtag, codec, status)]
    if flat is None:  # the buffer is sent or written, not both
        sent = start_send(comm, buf, dest, sendtag, OperationOptions(codec=codec))
        return [sent, start_recv(comm, buf, source, recvtag, codec, status)]
    sent = flat_p2p.send(comm.session, copied(flat), dest, sendtag, OperationOptions(codec=codec))
    if comm.session.unexpected is not None:
        return [sent, start_recv(comm, buf, source, recvtag, codec, status)]
    return [sent, stored(flat_p2p.recv(comm.session, flat, source, recvtag, codec, status), flat)]


# -- arrays whose length the receiver does not know ------------------------------------------------------


def Send_array(comm: Operates, array: Any, dest: int, tag: int = 0, **ours: Any) -> None:
    """Send an array of a dtype that codecs carry for :meth:`Recv_array`; compressed where the policy says so."""
    Isend_array(comm, array, dest, tag, **ours).wait()


def Isend_array(
    comm: Operates,
    array: Any,
    dest: int,
    tag: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Request:
    """Start :meth:`Send_array`."""
    return Request(
        flat_p2p.send(comm.session, parse(array), dest, tag, OperationOptions(name, phase, codec), frame=True)
    )


def Recv_array(
    comm: Operates,
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
    request, arrays = flat_p2p.recv_array(
        comm.session, source, tag, most_bytes, status, functools.partial(match, comm.session)
    )
    request.wait()
    return arrays[0]


# -- shared by sends and receives ------------------------------------------------------------------------


def _may_receive(session: Session, source: int) -> bool:
    return source == MPI.ANY_SOURCE or 0 <= source < session.size


def _single(session: Session, key: Key, buf: Any, _: Any, __: Any) -> Kind | None:
    """Return the kind of a send or receive of a plain array; None if it must take the usual way."""
    what, of_any_size, name, phase, codec = key
    try:
        flat = in_memory(buf)
    except ForeignBufferError:
        return None
    if flat.dtype.is_float and flat.dtype.itemsize == 2:
        return None
    # As bytes: MPICH stops the process where a part of an element comes, as of an encoded message. What one rank
    # alone sends itself is never encoded, and MPICH copies no elements of a derived datatype to bytes.
    moved = units(flat.dtype, flat.size) if session.size == 1 else (flat.nbytes, MPI.BYTE.handle)
    arguments = [0, *moved, 0, 0, session.p2p.handle]
    programs = session.message_programs
    if what == "recv":
        call = session.new_plain_call("recv", flat.nbytes, 0)
        # The policy compresses no message that fits a smaller buffer.
        least = session.compressed_from if codec is None and not of_any_size else 0
        if least is None or flat.nbytes < least or not flat_p2p.may_be_encoded(session, flat.dtype, codec):
            return call, arguments
        program = programs and programs.recv(flat_p2p.codecs_of(session, codec), flat.dtype, flat.size)
    else:
        choice = flat_p2p.choose_send(session, flat, OperationOptions(name, phase, codec))
        call = session.new_call("send", choice, flat.nbytes, flat.nbytes)
        if not choice.compresses:
            return call, arguments
        if choice.feedback is not None:  # feedback depends on the caller's place in a model
            return None
        program = programs and programs.send(choice.codec, flat.dtype, flat.size)
    return None if program is None else (call, program)


def _copied_memory(buf: Buffer) -> Buffer:
    """Return a buffer such as ``buf`` over a copy of its memory, gaps and all."""
    listed = isinstance(buf, list | tuple)
    owner = buf[0] if listed else buf
    copy: Any = owner
    if isinstance(owner, np.ndarray):
        copy = owner.copy(order="K")
    elif isinstance(owner, memoryview):
        copy = owner.tobytes("A")  # in the order of its memory
    elif owner is not None and owner is not MPI.BOTTOM:
        memory = MPI.buffer.frombuffer(owner, readonly=True)
        try:
            copy = memory.tobytes()
        except BufferError:  # a device's, which MPI alone reads
            copy = bytearray(memory.nbytes)
            MPI.COMM_SELF.Sendrecv([owner, memory.nbytes, MPI.BYTE], 0, 0, [copy, MPI.BYTE], 0, 0)
    if isinstance(copy, np.ndarray) or copy is owner or (listed and isinstance(buf[-1], MPI.Datatype | str)):
        return [copy, *buf[1:]] if listed else copy
    # mpi4py has read the type of the elements from the memory, of which bytes tell nothing.
    datatype, (_, count, displacement, _) = datatype_of(buf), Spec.of(buf)
    size = [] if count is None else [(count, displacement or 0)]
    return copy if datatype is None else [copy, *size, datatype]


def check_buffers(sendbuf: Buffer, dest: int, recvbuf: Buffer, source: int) -> None:
    """Raise mpi4py's error for a buffer that it does not take, before a receive is posted that would stay."""
    for spec, peer, writable in (sendbuf, dest, False), (recvbuf, source, True):
        if peer == MPI.PROC_NULL or is_torch(spec):
            continue
        try:
            datatype = Spec.of(spec).datatype
            if isinstance(datatype, MPI.Datatype) and datatype.handle not in BY_HANDLE:
                raise ForeignBufferError("its elements would be packed")
            parse(spec, writable=writable)
        except ForeignBufferError:
            check(spec, writable=writable)
