"""Start a communicator's operations: as programs of the compiled engine, schedules in Python, or MPI's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.device.streams import callers_events
from hybridcomp.collectives.device.through_host import through_host
from hybridcomp.collectives.engine.programs import running
from hybridcomp.collectives.execution.mpi_collectives import native
from hybridcomp.collectives.execution.post_queue import PostTicket
from hybridcomp.collectives.execution.progress import Request, engine
from hybridcomp.collectives.execution.steps import Pending, Ready, Steps
from hybridcomp.collectives.figures import Figures
from hybridcomp.collectives.gathering import gather
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.starting import Operands, OperationStarter
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice

# One of MPI's own operations, called with its send and receive buffers, its ticket, and the conditions to wait for
# before it is posted.
Native = Callable[[Any, Any, PostTicket, Sequence[Ready]], Steps]


class MpiStarter(Session, OperationStarter[Request]):
    """The ways in which a communicator's operations start, on buffers in host memory or on a device."""

    def find_compiled(self, key: OperationKey, algorithm: str | None) -> Callable[..., Request] | None:
        """Find an operation's program: see :meth:`.OperationStarter.find_compiled`."""
        program = None if self._programs is None else self._programs.find(key, algorithm)
        if program is None:
            return None
        assert self._programs is not None
        return functools.partial(self._execute, program, self._programs.codec(key, algorithm))

    def find_joined(
        self, key: OperationKey, extents: Sequence[tuple[int, int]]
    ) -> Callable[..., Request] | None:
        """Find the program of an operation on parts of an array: see :meth:`.OperationStarter.find_joined`."""
        program = None if self._programs is None else self._programs.find_joined(key, tuple(extents))
        if program is None:
            return None
        assert self._programs is not None
        codec = self._programs.codec(key._replace(counts=key.counts[:1]))  # that of every part
        return functools.partial(self._execute, program, codec)

    def start_sparing(self, key: OperationKey, call: Call, operands: Operands) -> Request | None:
        """Start an uncompressed operation in two levels, by the engine; None where it is MPI's.

        Args:
            key: key of the operation, whose counts are the same on all ranks.
            call: statistics of the operation.
            operands: buffers of the operation.
        """
        if self._programs is None or (operands.device and self.cuda_aware.collectives):
            return None
        program = self._programs.sparing(key)
        return None if program is None else self._execute(program, key.codec, call, operands)

    def gather_figures(self, values: Figures) -> Callable[[], Figures]:
        """Start to gather the deciding ranks' values: see :meth:`.OperationStarter.gather_figures`."""
        larger = self._automatic.together
        return gather(self, values) if larger is None else gather(larger, values, compare=True)

    def _tags(self) -> list[int]:
        return self.transport.tags()

    def reserve(self) -> Any:
        """Reserve the tags or numbers for the messages of one sum, in program order."""
        return super().reserve() if self._programs is None else self._programs.reserve()

    def sum_array(
        self, carrier: Carrier, flat: Flat, key: OperationKey, algorithm: str | None, reserved: Any
    ) -> Steps:
        """Sum an array over the ranks: see :meth:`.OperationStarter.sum_array`."""
        if self._programs is None:
            return super().sum_array(carrier, flat, key, algorithm, reserved)
        if not flat.size:
            return (Pending([], []) for _ in ())
        # Messages are framed, by the codec ``none``, where an algorithm is asked for.
        key = key._replace(compresses=algorithm is not None and not key.fold)
        return running(self._programs.find(key, algorithm), reserved, carrier, flat, flat)

    def _execute(
        self,
        program: Any,
        codec: Codec,
        call: Call,
        operands: Operands,
        *,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Request:
        """Start a compiled program; the arguments are those of :meth:`start_scheduled`, with the program's codec."""
        self._engine.check_process(
            call.op
        )  # a thread of the parent process may have held the lock taken below
        assert self._programs is not None
        first = self._programs.reserve()
        call.memory = "host"
        return self.start_carried(
            functools.partial(running, program, first, codec=codec),
            codec,
            call,
            operands,
            on_host=True,
            feedback=feedback,
        )

    def start_native(
        self,
        run: Native,
        call: Call,
        operands: Operands,
        *,
        direct: bool | None = None,
        transport: MpiTransport | None = None,
        exact: bool = True,
        status: MPI.Status | None = None,
    ) -> Request:
        """Start one of MPI's own operations, or another that MPI matches in the order of posting.

        Args:
            run: operation to start.
            call: statistics of the operation.
            operands: buffers of the operation.
            direct: whether to hand MPI the device's pointers; None to do so where MPI takes them in collectives.
            transport: transport whose queue the operation posts by; None for that of collectives.
            exact: whether it sends the bytes of an uncompressed operation; otherwise it counts its bytes itself.
            status: status of a receive.
        """
        send, recv, device, loads, written = operands
        t = transport or self.transport
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

        return self.start_posted(steps(), call, exact=exact, status=status, common=transport is None)

    def start_posted(self, steps: Steps, call: Call, **how: Any) -> Request:
        """Start an operation that MPI may refuse in the call; raise the refusal here, as MPI does."""
        request = self.start_steps(steps, call, **how)
        request.raise_refusal()
        return request

    def _foreign(
        self,
        op: str,
        post: Callable[[], MPI.Request],
        codec: CodecLike = None,
        *,
        transport: MpiTransport | None = None,
        peer: int = -1,
        status: MPI.Status | None = None,
        call: Call | None = None,
    ) -> Request:
        """Start one of MPI's own operations on the caller's buffers as they are.

        Args:
            op: operation, for error messages.
            post: function that starts it.
            codec: codec that the call asks for.
            transport, status: as in :meth:`start_native`.
            peer: rank at the other end; -1 for all ranks.
            call: statistics of the operation; None for buffers that only MPI understands, whose size is not in them.

        Raises:
            CodecMismatchError: the call asks for a codec.
        """
        fixed = codec.codec if isinstance(codec, Choice) else codec
        if fixed is not None and get_codec(fixed).name != "none":
            raise CodecMismatchError(f"{op}: a codec cannot carry a buffer that only MPI understands")
        t = transport or self.transport
        engine().check_process(op)
        if self._freed:
            raise self._gone(op)
        if transport is None:
            self._await_refusals(op)
        if t.post_queue.empty and self._comparison is None:
            # Post at once: where MPI refuses wrong arguments, this call raises, and no operation has begun.
            post = _begun(post())

        if call is None:
            call = Call(self.axis, op, NONE.spec, "a buffer that only MPI understands", 0, 0)
        return self.start_native(
            lambda _s, _r, ticket, events: native(post, ticket, events, peer, status),
            call,
            Operands(),
            transport=transport,
            status=status,
        )


def _begun(request: MPI.Request) -> Callable[[], MPI.Request]:
    """Return a function that "starts" an operation that MPI has already begun, by returning its request."""
    return lambda: request
