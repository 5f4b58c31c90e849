"""Start operations by schedules on flat buffers, in host memory or on a device, over any transport."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, ErrorFeedback
from hybridcomp.codecs.device.driver import has_driver
from hybridcomp.codecs.linear.base import UFUNCS
from hybridcomp.collectives.algorithms.schedules import OperationKey, Schedules
from hybridcomp.collectives.data_path.carrier import STREAM_BYTES, Carrier
from hybridcomp.collectives.data_path.coding import Array
from hybridcomp.collectives.data_path.schedule_run import run_schedule
from hybridcomp.collectives.device.data_path import DeviceCarrier
from hybridcomp.collectives.device.streams import callers_events
from hybridcomp.collectives.device.through_host import ByteExtents, through_host
from hybridcomp.collectives.execution.completion import Completion
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.figures import Figures
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray
from hybridcomp.policy import Choice
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.schedules.in_order import TAGS

# Handle of a started operation: a request of MPI's, or one of an exchange.
Started = TypeVar("Started", bound=Completion)

# An algorithm of this package, called with a carrier, send and receive buffers, and error-feedback memory or None.
Algorithm = Callable[[Carrier, Any, Any, Any], Steps]


class Operands(NamedTuple):
    """Buffers of one operation.

    Attributes:
        send, recv: flat buffers; None where the operation has none here.
        device: the caller's buffers, if they are on a device.
        loads, written: as in :func:`~hybridcomp.collectives.device.through_host.through_host`.
    """

    send: Flat | None = None
    recv: Flat | None = None
    device: Sequence[DeviceArray] = ()
    loads: bool = False
    written: Callable[[], ByteExtents] | None = None


class OperationStarter(abc.ABC, Generic[Started]):
    """The ways to start operations whose messages are encoded; each returns a ``Started``.

    Attributes:
        step: training step, for codecs that draw random numbers.
        feedback: error-feedback memory of named messages.
        warm: arrays that linear codecs keep of named messages.
        decider: decider of choices that the policy leaves to ``auto``; None where it leaves none.
        transport: transport of the messages.
        coalesced_below: bytes below which the arrays of a linear codec's round are summed in one operation.
    """

    step: int
    feedback: ErrorFeedback
    warm: dict[str, Array]
    decider: Decider | None = None
    transport: Any  # a Transport, whose kind a subclass says
    _schedules: Schedules
    _stream_from = STREAM_BYTES  # bytes from which results are written past the caches
    coalesced_below = 1 << 20  # bytes: smaller arrays of a linear codec's round are summed in one operation

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Return the number of this rank among those that take part."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of ranks that take part."""

    @property
    @abc.abstractmethod
    def hosts(self) -> int:
        """Return the number of hosts that these ranks are on."""

    def review(self) -> None:
        """Review the decisions of ``auto``, if that is due; called before an operation whose choice is asked for."""

    @abc.abstractmethod
    def gather_figures(self, values: Figures) -> Callable[[], Figures]:
        """Start to gather the values of all ranks that decide together, beside the operations that have been started.

        Collective over these ranks.

        Args:
            values: float64 [n], with the same n on all ranks.

        Returns:
            Function that waits for the values of all ranks and returns them: float64 [ranks, n]. Where groups decide
            together it raises :class:`~hybridcomp.errors.MismatchError` if their ``n`` differ.
        """

    @property
    @abc.abstractmethod
    def deciding(self) -> int:
        """Return the number of ranks that decide together: those of a larger communicator, or those that take part."""

    @property
    @abc.abstractmethod
    def axis(self) -> str:
        """Return the mesh axis that the ranks span."""

    @abc.abstractmethod
    def new_call(self, op: str, choice: Choice, raw: int, plain: int, **about: Any) -> Call:
        """Make the statistics of the operation that starts next."""

    @abc.abstractmethod
    def start_steps(self, steps: Steps, call: Call) -> Started:
        """Start an operation; return its request."""

    def start_carried(
        self,
        algorithm: Algorithm,
        codec: Codec,
        call: Call,
        operands: Operands,
        *,
        on_host: bool = False,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Started:
        """Start an algorithm of this package on host memory, on a device's memory, or on a host's copy of that.

        Args:
            algorithm: algorithm to start.
            codec: codec that the algorithm uses.
            call: statistics of the operation.
            operands: buffers of the operation, at least one.
            on_host: whether the algorithm cannot run on a device.
            feedback: function that returns the error-feedback memory, and gives the carrier the codec of its step.
        """
        send, recv, device, loads, written = operands
        given = send if recv is None else recv
        assert given is not None
        t: Transport = self.transport
        dtype = given.dtype
        encodes = bool(device) and not on_host and has_driver(codec)
        if encodes:
            carrier: Carrier = DeviceCarrier(t, codec, dtype, call, device)
        else:
            carrier = Carrier(t, codec, dtype, call)
        carrier.stream = recv is not None and recv.nbytes >= self._stream_from
        # The first step may run in another thread, whose streams are not the caller's.
        after = None if encodes or not device else callers_events(device)

        def steps() -> Steps:
            memory = None if feedback is None else feedback(carrier)
            if after is None:
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
                    after=after,
                )

        return self.start_steps(steps(), call)

    def start_failed(self, op: str, error: Exception) -> Started:
        """Start an operation that fails at once, for one that could not begin here, so that other ranks are told."""

        def steps() -> Steps:
            yield from ()
            raise error

        return self.start_steps(steps(), Call(self.axis, op, "none", "it could not begin", 0, 0))

    def start_scheduled(
        self,
        key: OperationKey,
        call: Call,
        operands: Operands,
        *,
        algorithm: str | None = None,
        feedback: Callable[[Carrier], Any] | None = None,
    ) -> Started:
        """Start an operation whose messages are encoded.

        Where its arrays lie on a device, and its codec has kernels for one, it is done step by step in Python, else in
        the compiled engine, if it is in use. All ranks must have their arrays in one kind of memory.

        Args:
            key: key of the operation.
            call: statistics of the operation.
            operands: buffers of the operation.
            algorithm: algorithm that the caller asks for; None to choose.
            feedback: as in :meth:`start_carried`.
        """
        found = None
        framed = key._replace(compresses=True)
        if operands.device and has_driver(key.codec):
            found = self._schedules.find(framed, algorithm)
        if found is None or found[0].on_host:  # message sizes decide, which a device does not tell in time
            start = self.find_compiled(key, algorithm)
            if start is not None:
                return start(call, operands, feedback=feedback)
        else:
            call.memory = "device"
        schedule, codec = found or self._schedules.find(framed, algorithm)
        tags = self._tags()
        return self.start_carried(
            lambda carrier, s, r, memory: run_schedule(carrier, schedule, s, r, tags, memory),
            codec,
            call,
            operands,
            on_host=schedule.on_host,
            feedback=feedback,
        )

    def find_compiled(self, key: OperationKey, algorithm: str | None) -> Callable[..., Started] | None:
        """Find an operation's program in the compiled engine; None where the engine does not run it, or is not in use.

        Returns:
            Function that starts the program with the operation's statistics, buffers and feedback.
        """
        return None

    def find_joined(
        self, key: OperationKey, extents: Sequence[tuple[int, int]]
    ) -> Callable[..., Started] | None:
        """Find the program of one operation on parts of an array in host memory; None where several are as good.

        Args:
            key: key of the operation, with the element count of each part as its counts.
            extents: first element and element count of each part.

        Returns:
            Function that starts it, as that of :meth:`find_compiled`.
        """
        return None

    # -- the sums of linear codecs -------------------------------------------------------------------

    def reserve(self) -> Any:
        """Reserve the tags for the messages of one sum, in program order."""
        return self._tags()

    def sum_array(
        self, carrier: Carrier, flat: Flat, key: OperationKey, algorithm: str | None, reserved: Any
    ) -> Steps:
        """Sum an array over the ranks: see :data:`~.data_path.linear.SumArray`."""
        how, _ = self._schedules.find(key._replace(compresses=True), "direct" if key.fold else algorithm)
        fold = UFUNCS[key.fold] if key.fold else None  # of linear codecs: nobody else has folds here
        return run_schedule(carrier, how, flat, flat, reserved, fold=fold)

    def _tags(self) -> list[int]:
        return [self.transport.tag() for _ in range(TAGS)]
