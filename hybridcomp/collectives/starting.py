"""Start an operation: as an algorithm in Python, a program of the compiled engine, or one of MPI's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.codecs.device.driver import has_driver
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.data_path.schedule_run import run_schedule
from hybridcomp.collectives.device.data_path import DeviceCarrier
from hybridcomp.collectives.device.streams import callers_events
from hybridcomp.collectives.device.through_host import Extents as ByteExtents
from hybridcomp.collectives.device.through_host import through_host
from hybridcomp.collectives.engine.programs import STREAM_BYTES, running
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.post_queue import PostTicket
from hybridcomp.collectives.execution.progress import Ready, Request, Steps, engine
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.mailbox import Transport
from hybridcomp.device import DeviceArray
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice
from hybridcomp.schedules.in_order import TAGS

# One of MPI's own operations on a send and a receive buffer, with its ticket and what to wait for before it is posted.
Native = Callable[[Any, Any, PostTicket, Sequence[Ready]], Steps]
# One of ours, with a memory of error feedback or None.
Algorithm = Callable[[Carrier, Any, Any, Any], Steps]


class Operands(NamedTuple):
    """The buffers of one operation.

    Attributes:
        send, recv: flat buffers; None where the operation has none here.
        device: the caller's, if they are on a device.
        loads, written: as of :func:`~hybridcomp.collectives.device.through_host.through_host`.
    """

    send: Flat | None = None
    recv: Flat | None = None
    device: Sequence[DeviceArray] = ()
    loads: bool = False
    written: Callable[[], ByteExtents] | None = None


class OperationStarter(Session):
    """The ways in which a communicator's operations start, on buffers in host memory or on a device."""

    def _carried(
        self,
        algorithm: Algorithm,
        codec: Codec,
        call: Call,
        operands: Operands,
        *,
        on_host: bool = False,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Request:
        """Start one of our algorithms, on host memory, on a device's, or on a host's copy of that.

        Args:
            algorithm: to start.
            codec: that it uses.
            call: statistics.
            operands: its buffers, at least one.
            on_host: it cannot run on a device.
            feedback: gives the memory, and the carrier the codec of its step.
        """
        send, recv, device, loads, written = operands
        given = send if recv is None else recv
        assert given is not None
        t, dtype = self._transport, given.dtype
        encodes = bool(device) and not on_host and has_driver(codec)
        if encodes:
            carrier: Carrier = DeviceCarrier(t, codec, dtype, call, device)
        else:
            carrier = Carrier(t, codec, dtype, call)
        carrier.stream = recv is not None and recv.nbytes >= STREAM_BYTES

        def steps() -> Steps:
            memory = None if feedback is None else feedback(carrier)
            if encodes or not device:
                yield from algorithm(carrier, send, recv, memory)
            else:
                yield from through_host(
                    t,
                    device,
                    send,
                    recv,
                    lambda s, r: algorithm(carrier, s, r, memory),
                    loads=loads,
                    written=written,
                )

        return self._start(steps(), call)

    def start_failed(self, op: str, error: Exception) -> Request:
        """Start an operation that fails at once, in place of one that could not begin here: other ranks are told."""

        def steps() -> Steps:
            yield from ()
            raise error

        return self._start(steps(), self._plain_call(op, 0, 0))

    def _compiled(
        self,
        key: OperationKey,
        call: Call,
        operands: Operands,
        *,
        algorithm: str | None = None,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Request | None:
        """Start an operation in the compiled engine; None where the engine does not do it.

        Args:
            key: the operation.
            call: statistics.
            operands: its buffers.
            algorithm: the caller's; None to choose.
            feedback: as of :meth:`_carried`.
        """
        programs = self._programs
        program = None if programs is None else programs.find(key, algorithm)
        if program is None:
            return None
        return self._execute(program, key.codec, call, operands, feedback=feedback)

    def _scheduled(
        self,
        key: OperationKey,
        call: Call,
        operands: Operands,
        *,
        algorithm: str | None = None,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Request:
        """Start an operation whose messages are encoded: in the compiled engine, else step by step in Python.

        The arguments are those of :meth:`_compiled`.
        """
        request = self._compiled(key, call, operands, algorithm=algorithm, feedback=feedback)
        if request is not None:
            return request
        key = key._replace(compresses=True)
        schedule = self._schedules.find(key, algorithm)
        tags = [self._transport.tag() for _ in range(TAGS)]
        return self._carried(
            lambda carrier, s, r, memory: run_schedule(carrier, schedule, s, r, tags, memory),
            key.codec,
            call,
            operands,
            on_host=schedule.on_host,  # the sizes of messages decide, which a device's do not tell in time
            feedback=feedback,
        )

    def _execute(
        self,
        program: Any,
        codec: Codec,
        call: Call,
        operands: Operands,
        *,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Request:
        """Start a compiled program; the arguments are those of :meth:`_compiled`, with the program's codec."""
        engine().check_process(call.op)  # a thread of the parent's may have held the lock that this takes
        assert self._programs is not None
        first = self._programs.reserve()
        return self._carried(
            lambda carrier, s, r, memory: running(program, first, s, r, carrier, memory, codec=codec),
            codec,
            call,
            operands,
            on_host=True,
            feedback=feedback,
        )

    def _native(
        self,
        run: Native,
        call: Call,
        operands: Operands,
        *,
        direct: bool | None = None,
        transport: Transport | None = None,
        exact: bool = True,
        status: MPI.Status | None = None,
    ) -> Request:
        """Start one of MPI's own operations, or one that is matched in the order of posting.

        Args:
            run: to start.
            call: statistics.
            operands: its buffers.
            direct: hand MPI the device's pointers; None where it takes them in collectives.
            transport: whose queue it posts by; None is the collectives'.
            exact: it carries what a plain one would; else it counts its bytes itself.
            status: of a receive.
        """
        send, recv, device, loads, written = operands
        t = transport or self._transport
        if direct is None:
            direct = self.cuda_aware.collectives

        def steps() -> Steps:
            with t.post_queue.take().held() as ticket:
                if direct or not device:
                    yield from run(send, recv, ticket, callers_events(device))
                else:
                    yield from through_host(
                        t,
                        device,
                        send,
                        recv,
                        lambda s, r: run(s, r, ticket, ()),
                        loads=loads,
                        written=written,
                    )

        return self._posted(steps(), call, exact=exact, status=status, common=transport is None)

    def _posted(self, steps: Steps, call: Call, **how: Any) -> Request:
        """Start an operation that MPI may refuse in the call: raise that here, as MPI does."""
        request = self._start(steps, call, **how)
        request.raise_refusal()
        return request

    def _foreign(
        self,
        op: str,
        post: Callable[[], MPI.Request],
        codec: CodecLike = None,
        *,
        transport: Transport | None = None,
        peer: int = -1,
        status: MPI.Status | None = None,
    ) -> Request:
        """Start one of MPI's own operations on buffers that only MPI understands; statistics do not know their size.

        Raises:
            CodecMismatchError: the call asks for a codec.
        """
        fixed = codec.codec if isinstance(codec, Choice) else codec
        if fixed is not None and get_codec(fixed).name != "none":
            raise CodecMismatchError(f"{op}: a codec cannot carry a buffer that only MPI understands")
        t = transport or self._transport
        engine().check_process(op)
        if t.post_queue.empty and self._comparison is None:
            # Here, since wrong arguments are this rank's own affair: no operation has begun.
            post = _begun(post())

        call = Call(self.axis, op, NONE.spec, "a buffer that only MPI understands", 0, 0)
        return self._native(
            lambda _s, _r, ticket, events: native(post, ticket, events, peer, status),
            call,
            Operands(),
            transport=transport,
            status=status,
        )


def _begun(request: MPI.Request) -> Callable[[], MPI.Request]:
    """Return a function that "starts" an operation which MPI has begun."""
    return lambda: request
