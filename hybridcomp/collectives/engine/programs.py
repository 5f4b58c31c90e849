"""Run schedules on host memory: compile them once, start them on arrays, and wait for their results."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from hybridcomp import trace
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec, Memory
from hybridcomp.codecs.feedback.memory import JoinedMemory
from hybridcomp.collectives.algorithms.schedules import FOLDS, KeyExtents, OperationKey, Schedules
from hybridcomp.collectives.data_path.carrier import STREAM_BYTES, Carrier
from hybridcomp.collectives.data_path.coding import Coder
from hybridcomp.collectives.engine.faults import error_of
from hybridcomp.collectives.engine.python_steps import (
    PythonProgram,
    PythonSteps,
    at_step,
    message_bounds,
    needs_python,
)
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.native import kernels
from hybridcomp.schedules.joined import joined
from hybridcomp.schedules.layout import REDUCTIONS
from hybridcomp.schedules.schedule import Schedule

_MOST_PROGRAMS = 1024
START_SECONDS = 5e-6  # time that an operation computes before its start returns


class Programs:
    """Compiled schedules of one communicator.

    Args:
        group: group of the engine.
        schedules: schedules of the communicator.

    Attributes:
        reserve: function that reserves the numbers of an operation's messages: to be called in program order, before
            anything delays the operation's start.
    """

    def __init__(self, group: Any, schedules: Schedules) -> None:
        self.group = group
        self.reserve: Callable[[], int] = group.reserve
        self._schedules = schedules
        self._programs: dict[tuple[Any, ...], Any] = {}

    def find(self, key: OperationKey, algorithm: str | None = None, *, alone: bool = False) -> Any:
        """Return the program of an operation; None where the engine does not run it.

        Args:
            key: key of the operation.
            algorithm: algorithm that the caller asks for if the operation is compressed; None to choose.
            alone: whether the program must do without steps in Python, where no thread would compute them.

        Returns:
            A :class:`~hybridcomp.collectives.engine.python_steps.PythonProgram` where Python computes steps, else
            the compiled module's ``EngineProgram``.

        Raises:
            ValueError: the algorithm cannot be used here.
        """
        if not _runs(key):
            return None
        if alone and _asks_python(key):
            return None
        name, chunk = self._schedules.choose(key, algorithm)
        entry = (key, name, chunk)
        program = self._programs.get(entry)
        if program is None:
            program = self._compile(key, name, chunk)
            self._keep(entry, program)
        return program

    def sparing(self, key: OperationKey) -> Any:
        """Return the program of an uncompressed operation in two levels; None where MPI does it as well.

        Args:
            key: key of the operation, whose counts are the same on all ranks.
        """
        if key.compresses or not self._schedules.spares_network(key):
            return None
        return self.find(key._replace(dtype=DType.UINT8) if key.dtype is DType.BOOL else key)

    def codec(self, key: OperationKey, algorithm: str | None = None) -> Codec:
        """Return the codec of the messages of the program that :meth:`find` returns: see :meth:`.Schedules.codec`."""
        if not key.shares:
            return key.codec
        name, _ = self._schedules.choose(key, algorithm)
        return self._schedules.codec(key, name)

    def find_joined(self, key: OperationKey, extents: KeyExtents) -> Any:
        """Return the program of one operation on parts of an array, each carried as if by itself.

        Args:
            key: key of the operation, with the element count of each part as its counts.
            extents: first element and element count of each part.

        Returns:
            The compiled module's ``EngineProgram``; None where the engine does not run it, or not without Python, or
            the parts do not have one codec by their algorithms.
        """
        entry = (key, extents)
        program = self._programs.get(entry)
        if program is not None or not _runs(key) or _asks_python(key):
            return program
        schedules = []
        codecs = set()
        for count in key.counts:
            part = key._replace(counts=(count,))
            name, chunk = self._schedules.choose(part)
            schedule, _ = self._schedules.build(part, name, chunk)
            if schedule.regions:
                return None
            schedules.append(schedule)
            codecs.add(self._schedules.codec(part, name))
        if len(codecs) > 1:
            return None
        schedule = joined(schedules, [start for start, _ in extents])
        size = max(start + n for start, n in extents)
        own = codecs.pop() if key.compresses else None
        program = compiled(self.group, schedule, own, key.dtype, [size, size])
        self._keep(entry, program)
        return program

    def _keep(self, entry: tuple[Any, ...], program: Any) -> None:
        if len(self._programs) >= _MOST_PROGRAMS:
            self._programs.clear()
        self._programs[entry] = program

    def _compile(self, key: OperationKey, algorithm: str, chunk: int) -> Any:
        dtype, codec = key.dtype, self._schedules.codec(key, algorithm)
        schedule, sizes = self._schedules.build(key, algorithm, chunk)
        if not _asks_python(key):
            own = codec if key.compresses else None
            return compiled(self.group, schedule, own, dtype, sizes, fold=key.fold)
        bounds = message_bounds(schedule, codec, dtype)
        return PythonProgram(compiled(self.group, schedule, codec, dtype, sizes, bounds=bounds), schedule)


def compiled(
    group: Any,
    schedule: Schedule,
    codec: Codec | None,
    dtype: DType,
    sizes: Sequence[int],
    *,
    fold: str = "",
    framed: int = 0,
    bounds: array[int] | None = None,
) -> Any:
    """Compile a schedule.

    Args:
        group: group of the engine.
        schedule: schedule of one rank.
        codec: codec of its messages; None where they are the elements as they are.
        dtype: dtype of the caller's elements.
        sizes: element counts of the send buffer and of the receive buffer.
        fold: as in :class:`OperationKey`.
        framed: bytes of the longest message of a send or receive, whose peer and tag are given at its start; else 0.
        bounds: bytes of each slot's longest message where Python encodes; else None.

    Returns:
        The compiled module's ``EngineProgram``.
    """
    steps, slots, lists = schedule.packed()
    return kernels().engine_program(
        group,
        None if codec is None or bounds is not None else codec.encoder,
        0 if codec is None else codec.wire_id,
        0 if codec is None else codec.params_hash,
        dtype,
        FOLDS.index(fold),
        schedule.rank,
        schedule.ranks,
        sizes[1] * dtype.itemsize >= STREAM_BYTES,
        max(sizes) * dtype.itemsize,
        framed,
        steps,
        slots,
        lists,
        (*sizes, schedule.scratch),
        bounds,
    )


def _runs(key: OperationKey) -> bool:
    """Tell whether the engine runs an operation."""
    if key.fold or (not key.compresses and key.kind not in REDUCTIONS):
        return True
    if not key.dtype.is_float or key.codec.linear:
        return False
    return bool(key.reduction) or key.kind not in REDUCTIONS


def _asks_python(key: OperationKey) -> bool:
    """Tell whether the engine asks Python for the steps of an operation that need its codec."""
    return key.compresses and needs_python(key.codec, key.dtype, sums=key.kind in REDUCTIONS)


def running(
    program: Any,
    first: int,
    carrier: Carrier,
    send: Flat | None,
    recv: Flat | None,
    memory: Memory | JoinedMemory | None = None,
    *,
    codec: Codec | None = None,
) -> Steps:
    """Start a program on two arrays in host memory, with an error-feedback memory whose step has begun.

    Args:
        program: result of :meth:`Programs.find`.
        first: first of the message numbers that the group has reserved for the run.
        carrier: carrier of the operation, with the codec of the step.
        send, recv: the arrays; None where the program uses none.
        memory: error-feedback memory; None for none.
        codec: codec that the program was compiled for; None for the carrier's.

    Returns:
        The steps that wait for its end.

    Raises:
        WireError, MismatchError: a peer's message is damaged or unexpected.
        Exception: the error of a step in Python.
    """
    steps, handle = None, program
    if isinstance(program, PythonProgram):
        assert not isinstance(memory, JoinedMemory)
        steps = PythonSteps(program.schedule, send, recv, carrier, memory)
        handle = program.handle
    if codec is not None and codec is not carrier.codec:
        handle = at_step(program, carrier.codec, carrier.dtype)
    carried = carrier.transport.compiled
    run = started(handle, send, recv, START_SECONDS, first=first, memory=memory, carried=carried)
    return awaited(run, carrier) if steps is None else _stepped(steps, run, carrier)


def _stepped(steps: PythonSteps, run: Any, carrier: Carrier) -> Steps:
    yield from steps.until_ended(run)
    yield from awaited(run, carrier)


def started(
    handle: Any,
    send: Flat | None,
    recv: Flat | None,
    seconds: float,
    *,
    first: int = 0,
    memory: Memory | JoinedMemory | None = None,
    envelope: tuple[int, int] | None = None,
    carried: Any = None,
) -> Any:
    """Start a compiled program on two arrays in host memory.

    Args:
        handle: the compiled module's ``EngineProgram``.
        send, recv: the arrays; None where the program uses none.
        seconds: time for which it computes at most before this returns.
        first: first of the message numbers that its group has reserved for the run.
        memory: error-feedback memory, whose step has begun; None for none.
        envelope: peer and tag of a framed message; else None.
        carried: the compiled module's ``CarriedOperations`` that it is one of; None where MPI carries its messages.

    Returns:
        The compiled module's ``EngineRun``.
    """
    module = kernels()
    begins = (
        0 if send is None else module.address(send.data),
        0 if recv is None else module.address(recv.data),
    )
    native_memory = None if memory is None else memory.native
    traced = trace.recorder is not None
    if carried is not None:
        return carried.start(handle, first, *begins, native_memory, (send, recv, memory), traced)
    return module.engine_start(
        handle, first, *begins, native_memory, (send, recv, memory), seconds, traced, envelope
    )


def ended(run: Any) -> Steps:
    """Wait until a run has ended."""
    if not run.done():
        run.watch()
        yield Pending([], [], run=run)


def awaited(run: Any, coder: Coder) -> Steps:
    """Wait until a run has ended, raise its error, or count its work."""
    if not run.done():
        run.watch()
        yield Pending([], [], run=run)
    failure = run.failure()
    if failure is not None:
        raise error_of(failure, coder)
    coder.call.tally(run.tally(), run.intervals())
