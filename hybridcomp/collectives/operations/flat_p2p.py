"""Start sends and receives of flat buffers."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import DType, Flat, empty_like_dtype
from hybridcomp.codecs import get_codec
from hybridcomp.codecs.device.driver import has_driver
from hybridcomp.collectives.buffers import raw
from hybridcomp.collectives.choices import CodecLike, OperationOptions
from hybridcomp.collectives.data_path import framing as p2p
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.data_path.links import Link
from hybridcomp.collectives.data_path.unexpected import Drawn, Match, receive_array, receive_drawn
from hybridcomp.collectives.device.data_path import DeviceCarrier
from hybridcomp.collectives.device.through_host import through_host
from hybridcomp.collectives.engine.messages import MessagePrograms, receiving, sending
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.progress import Request
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.memory import on_device
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.starting import Operands
from hybridcomp.device import DeviceArray
from hybridcomp.policy import Choice, check_feedback, place

# An encoded message is buffered already, and a receiver that is ready for any message is ready for it.
_FRAMED_MODES = {"Ibsend": "Isend", "Irsend": "Isend"}


def send(
    session: Session,
    data: Flat,
    dest: int,
    tag: int,
    options: OperationOptions,
    *,
    mode: str = "Isend",
    frame: bool = False,
) -> Request:
    """Start a send.

    Args:
        session: session of the communicator that sends.
        data: buffer to send.
        dest, tag: as in MPI.
        options: what the caller asks for.
        mode: name of MPI's method.
        frame: whether to encode the message whatever the policy says.
    """
    session.check_rank(dest, "dest")
    device = on_device(data)
    choice = choose_send(session, data, options)
    framed = frame or choice.compresses
    call = session.new_call("send", choice, data.nbytes, data.nbytes, peer=dest)
    if call.traced:
        call.place = {"peer": session.world_ranks[dest], "tag": tag}
    t = session.message_transport
    if not framed:
        post = getattr(t.comm, mode)
        return session.start_native(
            lambda s, _, ticket, events: native(
                lambda: t.start(dest, lambda: post(raw(s), dest, tag)), ticket, events, dest
            ),
            call,
            Operands(data, None, device),
            direct=t.direct,
            transport=t,
        )
    carrier = Carrier(t, choice.codec, data.dtype, call)
    link = _link(session, choice)
    mode = _FRAMED_MODES.get(mode, mode)
    programs = _programs_now(session, device)
    if programs is not None and link is None and mode == "Isend" and dest in t.contacts.met:
        program = programs.send(choice.codec, data.dtype, data.size)
        if program is not None:
            return session.start_posted(sending(program, data, dest, tag, carrier), call, common=False)
    encodes = bool(device) and has_driver(choice.codec) and link is None
    if encodes:
        carrier = DeviceCarrier(t, choice.codec, data.dtype, call, device)
    return session.start_native(
        lambda s, _, ticket, _events: p2p.send_message(carrier, s, dest, tag, mode, ticket, link),
        call,
        Operands(data, None, device),
        direct=encodes,
        transport=t,
        exact=False,
    )


def recv(
    session: Session,
    out: Flat,
    source: int,
    tag: int,
    codec: CodecLike,
    status: MPI.Status | None = None,
) -> Request:
    """Start a receive; the request's ``status``, which the caller may give, tells source and count."""
    if source != MPI.ANY_SOURCE:
        session.check_rank(source, "source")
    status = MPI.Status() if status is None else status
    call = session.new_plain_call("recv", out.nbytes, 0)
    t = session.message_transport
    device = on_device(out)
    if not may_be_encoded(session, out.dtype, codec):
        return session.start_native(
            lambda _, r, ticket, events: native(
                lambda: t.comm.Irecv(raw(r), source, tag), ticket, events, source, status
            ),
            call,
            Operands(None, out, device, written=lambda: [(0, status.Get_count(MPI.BYTE))]),
            direct=t.direct,
            transport=t,
            status=status,
        )
    codecs = codecs_of(session, codec)
    carrier = Carrier(t, NONE, out.dtype, call)
    programs = _programs_now(session, device)
    if programs is not None:
        program = programs.recv(codecs, out.dtype, out.size)
        if program is not None:
            steps = receiving(program, out, source, tag, status, carrier)
            return session.start_posted(steps, call, status=status, common=False)
    longest = p2p.room(codecs, out.size, out.dtype)
    if device:
        direct = t.direct and all(map(has_driver, codecs))
        carrier = DeviceCarrier(t, NONE, out.dtype, call, device, direct=direct, others=codecs)
    return session.start_native(
        lambda _, r, ticket, _events: p2p.receive_message(carrier, r, longest, source, tag, status, ticket),
        call,
        Operands(None, out, device),
        direct=True,
        transport=t,
        exact=False,
        status=status,
    )


def recv_drawn(session: Session, message: Drawn, out: Flat, status: MPI.Status) -> Request:
    """Start to receive a message that a probe has taken from MPI."""
    call = session.new_plain_call("recv", out.nbytes, 0)
    t = session.message_transport
    device = on_device(out)
    carrier = Carrier(t, NONE, out.dtype, call)

    def steps(_: Any, r: Any) -> Steps:
        return receive_drawn(carrier, message, r, status)

    if not device:
        return session.start_steps(steps(None, out), call, status=status, common=False)

    def written() -> list[tuple[int, int]]:
        return [(0, status.Get_count(MPI.BYTE))]

    staged = through_host(t, device, None, out, steps, written=written)
    return session.start_steps(staged, call, status=status, common=False)


def recv_array(
    session: Session, source: int, tag: int, most_bytes: int, status: MPI.Status | None, match: Match
) -> tuple[Request, list[Any]]:
    """Start to receive a framed message of any length; return the request, and a list that will hold the array."""
    if source != MPI.ANY_SOURCE:
        session.check_rank(source, "source")
    status = MPI.Status() if status is None else status
    call = session.new_plain_call("recv", 0, 0)
    carrier = Carrier(session.message_transport, NONE, DType.UINT8, call)
    arrays: list[Any] = []

    def keep(dtype: DType, n: int) -> Array:
        arrays.append(empty_like_dtype(n, dtype, torch_out=False))
        values: Array = arrays[0].view(dtype.storage)
        return values

    steps = receive_array(carrier, keep, most_bytes, source, tag, status, match)
    return session.start_steps(steps, call, status=status, common=False), arrays


def _programs_now(session: Session, device: list[DeviceArray]) -> MessagePrograms | None:
    """Return the engine's programs, which post at once; None where a message may not be posted now."""
    return None if device or not session.message_transport.post_queue.empty else session.message_programs


def choose_send(session: Session, data: Flat, options: OperationOptions) -> Choice:
    """Choose the codec of a send; ``none`` for elements other than floats."""
    choice = session.choose("send", data, options)
    if choice.compresses and not data.dtype.is_float:
        return Choice(NONE, None, f"sends of {data.dtype.label} are not compressed")
    return choice


def _link(session: Session, choice: Choice) -> Link | None:
    """Return the memory of the link that the program names around a compressed send; None for none."""
    name = place().link
    if name is None or (choice.feedback is None and choice.codec.name != "powersgd"):
        return None
    check_feedback("send", choice.codec, choice.feedback)
    return Link((session.axis, name), choice.feedback, session.feedback, session.warm)


def codecs_of(session: Session, codec: CodecLike) -> tuple[Any, ...]:
    """Return the codecs that may carry a message on this axis, or with this call's codec."""
    if isinstance(codec, Choice):
        return (codec.codec,)
    return session.policy.codecs(session.axis, "send") if codec is None else (get_codec(codec),)


def may_be_encoded(session: Session, dtype: DType, codec: CodecLike) -> bool:
    """Tell whether sends of a dtype may be compressed here, with the same answer at both ends for any size."""
    return dtype.is_float and any(c.name != "none" for c in codecs_of(session, codec))
