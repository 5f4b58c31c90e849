"""Run schedules on host memory: compile them once, start them on arrays, and wait for their results."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec, Memory
from hybridcomp.codecs.feedback.joined import JoinedMemory
from hybridcomp.codecs.linear.base import FOLDS
from hybridcomp.collectives.algorithms.registry import ALGORITHMS
from hybridcomp.collectives.algorithms.selection import AlgorithmChoice, Chooser
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import Coder
from hybridcomp.collectives.engine.faults import error_of
from hybridcomp.collectives.engine.python_steps import (
    PythonProgram,
    PythonSteps,
    at_step,
    message_bounds,
    needs_python,
)
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.collectives.execution.request import Pending, Steps
from hybridcomp.native import kernels
from hybridcomp.policy import Choice
from hybridcomp.schedules import registry
from hybridcomp.schedules.joined import joined
from hybridcomp.schedules.placement import placed
from hybridcomp.schedules.results import REDUCTIONS, layout
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.shards import CHUNK_BYTES
from hybridcomp.schedules.topology import Topology

_MOST_PROGRAMS = 1024
STREAM_BYTES = 1 << 23  # results from here on are written past the caches
_FOLDS = ("", *FOLDS)  # as kernels/engine/fold.hpp numbers them
START_SECONDS = 5e-6  # that an operation computes before its start returns

Extents = tuple[tuple[int, int], ...]


class Ended:
    """The event that a run has ended."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def done(self) -> bool:
        """Tell whether the run has ended."""
        return bool(self._run.done())


class OperationKey(NamedTuple):
    """The key under which the program of an operation on one rank is cached.

    Attributes:
        kind: of :data:`~hybridcomp.schedules.registry.ALGORITHMS`.
        codec: of the messages.
        compresses: messages are encoded, and not the elements as they are.
        dtype: of the caller's elements.
        counts: as of :class:`~hybridcomp.schedules.schedule.Operation`; a rank may say 0 where it has no part. Of an
            all-to-all they follow from the two below.
        reduction: of a reduction: ``"sum"``, ``"avg"``, or ``""`` for all that the engine does not do.
        feedback: the form of its memory; None if it has none.
        root: of operations that have one.
        fold: of an all-reduce of integers as they are, which of
            :data:`~hybridcomp.codecs.linear.base.FOLDS` it is; ``""`` for all else.
        sends, receives: where the parts of the rank's buffers lie, if they are parts of any size: the chunks of such
            operations are not chosen, since ranks may not know each other's sizes.
    """

    kind: str
    codec: Codec
    compresses: bool
    dtype: DType
    counts: tuple[int, ...]
    reduction: str = "sum"
    feedback: str | None = None
    root: int = 0
    fold: str = ""
    sends: Extents | None = None
    receives: Extents | None = None

    @classmethod
    def of(
        cls, kind: str, choice: Choice, dtype: DType, counts: tuple[int, ...], op: Any = MPI.SUM, **more: Any
    ) -> OperationKey:
        """Make the key of an operation with a policy's choice and the caller's reduction."""
        reduction = "avg" if op == AVG else "sum" if op == MPI.SUM else ""
        return cls(kind, choice.codec, choice.compresses, dtype, counts, reduction, **more)


class Programs:
    """The compiled schedules of one communicator.

    Args:
        group: the engine's.
        topology, rank: of the communicator.
        chooser: of algorithms.
    """

    def __init__(self, group: Any, topology: Topology, rank: int, chooser: Chooser) -> None:
        self.group = group
        self._topology = topology
        self._rank = rank
        self._chooser = chooser
        self._programs: dict[tuple[Any, ...], Any] = {}

    def reserve(self) -> int:
        """Reserve the numbers of an operation's messages: in program order, before anything delays its start."""
        return int(self.group.reserve())

    def find(self, key: OperationKey, algorithm: str | None = None, *, alone: bool = False) -> Any:
        """Return the program of an operation; None where the engine does not do it.

        Args:
            key: the operation.
            algorithm: the caller's, for what is compressed; None to choose.
            alone: without Python, where nobody would compute a step for it.

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
        # Sizes that are the same on all ranks decide how; else it is always the first algorithm.
        name, chunk = "direct", CHUNK_BYTES
        if key.kind in ALGORITHMS and key.sends is None and key.receives is None:
            chosen = self._choose_algorithm(key, algorithm if key.compresses else None)
            if chosen is None:
                return None
            name, chunk = chosen.algorithm.name, chosen.chunk_bytes
        entry = (key, name, chunk)
        program = self._programs.get(entry)
        if program is None:
            program = self._compile(key, name, chunk)
            self._keep(entry, program)
        return program

    def find_joined(self, key: OperationKey, extents: Extents) -> Any:
        """Return the program of one operation on parts of an array, each carried as by itself.

        Args:
            key: the operation, with the elements of each part as its counts.
            extents: of each part, where it begins, and its elements.

        Returns:
            The compiled module's ``EngineProgram``; None where the engine does not do it, or not without Python.
        """
        entry = (key, extents)
        program = self._programs.get(entry)
        if program is not None or not _runs(key) or _asks_python(key):
            return program
        schedules = []
        for count in key.counts:
            part = key._replace(counts=(count,))
            chosen = self._choose_algorithm(part, None)
            if chosen is None:
                return None
            schedule, _ = self._schedule(part, chosen.algorithm.name, chosen.chunk_bytes)
            if schedule.regions:
                return None
            schedules.append(schedule)
        schedule = joined(schedules, [start for start, _ in extents])
        size = max(start + n for start, n in extents)
        own = key.codec if key.compresses else None
        program = compiled(self.group, schedule, own, key.dtype, [size, size])
        self._keep(entry, program)
        return program

    def _keep(self, entry: tuple[Any, ...], program: Any) -> None:
        if len(self._programs) >= _MOST_PROGRAMS:
            self._programs.clear()
        self._programs[entry] = program

    def _choose_algorithm(self, key: OperationKey, algorithm: str | None) -> AlgorithmChoice | None:
        """Choose the algorithm and chunks of an operation; return None where the algorithm has no schedule."""
        chosen = self._chooser.choose(
            key.kind,
            sum(key.counts) * key.dtype.itemsize,
            key.dtype,
            key.codec,
            key.feedback,
            algorithm,
            engine=True,
            plain=not key.compresses,
        )
        return chosen if chosen.algorithm.scheduled(key.kind) else None

    def _schedule(self, key: OperationKey, algorithm: str, chunk: int) -> tuple[Schedule, Operation]:
        dtype, codec = key.dtype, key.codec
        operation = Operation(
            key.kind,
            self._counts(key),
            dtype.itemsize,
            plain=not key.compresses,
            exact=codec.lossless,
            feedback=key.feedback is not None,
            mean=key.reduction == "avg",
            root=key.root,
            chunk_bytes=chunk,
        )
        return registry.find(key.kind, algorithm).build(operation, self._topology, self._rank), operation

    def _compile(self, key: OperationKey, algorithm: str, chunk: int) -> Any:
        dtype, codec = key.dtype, key.codec
        schedule, operation = self._schedule(key, algorithm, chunk)
        room = layout(operation, len(self._topology.hosts), self._rank)
        sizes = [room.send, room.recv]
        for at, (buffer, extents) in enumerate(((Buffer.SEND, key.sends), (Buffer.RECV, key.receives))):
            if extents is not None and sizes[at]:
                schedule = placed(schedule, buffer, extents)
                sizes[at] = max(start + n for start, n in extents)
        if not _asks_python(key):
            own = codec if key.compresses else None
            return compiled(self.group, schedule, own, dtype, sizes, fold=key.fold)
        bounds = message_bounds(schedule, codec, dtype)
        return PythonProgram(compiled(self.group, schedule, codec, dtype, sizes, bounds=bounds), schedule)

    def _counts(self, key: OperationKey) -> tuple[int, ...]:
        if key.kind != "all_to_all":
            return key.counts
        assert key.sends is not None
        assert key.receives is not None
        ranks = len(self._topology.hosts)
        counts = [0] * (ranks * ranks)  # a rank knows of its own parts alone
        counts[self._rank :: ranks] = [n for _, n in key.receives]
        counts[self._rank * ranks : (self._rank + 1) * ranks] = [n for _, n in key.sends]
        return tuple(counts)


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
        group: the engine's.
        schedule: of one rank.
        codec: of its messages; None where they are the elements as they are.
        dtype: of the caller's elements.
        sizes: elements of the send buffer and of the receive buffer.
        fold: of :class:`OperationKey`.
        framed: of a send or receive, bytes of the longest message; its peer and tag are given at its start.
        bounds: where Python encodes, of each slot the bytes of its longest message.

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
        _FOLDS.index(fold),
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
    if key.fold:
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
    send: Flat | None,
    recv: Flat | None,
    carrier: Carrier,
    memory: Memory | JoinedMemory | None = None,
    *,
    codec: Codec | None = None,
) -> Steps:
    """Run a program on two arrays in host memory, with a memory of error feedback whose step has begun.

    Args:
        program: of :meth:`Programs.find`.
        first: the numbers that the group has reserved for it.
        send, recv: the arrays; None where the program uses none.
        carrier: of the operation, with the codec of the step.
        memory: of error feedback.
        codec: that the program was compiled for; None is the carrier's.

    Raises:
        WireError, MismatchError: from a peer's message.
        Exception: whatever a step of Python's has raised.
    """
    steps, handle = None, program
    if isinstance(program, PythonProgram):
        assert not isinstance(memory, JoinedMemory)
        steps = PythonSteps(program.schedule, send, recv, carrier, memory)
        handle = program.handle
    if codec is not None and codec is not carrier.codec:
        handle = at_step(program, carrier.codec, carrier.dtype)
    run = started(handle, send, recv, START_SECONDS, first=first, memory=memory)
    if steps is not None:
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
) -> Any:
    """Start a compiled program on two arrays in host memory.

    Args:
        handle: the compiled module's ``EngineProgram``.
        send, recv: the arrays; None where the program uses none.
        seconds: that it computes at most before this returns.
        first: the numbers that its group has reserved for it.
        memory: of error feedback, whose step has begun.
        envelope: of a framed message, its peer and tag.

    Returns:
        The compiled module's ``EngineRun``.
    """
    module = kernels()
    begins = [0 if flat is None else module.address(flat.data) for flat in (send, recv)]
    native_memory = None if memory is None else memory.native
    traced = trace.recorder is not None
    return module.engine_start(
        handle, first, *begins, native_memory, (send, recv, memory), seconds, traced, envelope
    )


def ended(run: Any) -> Steps:
    """Wait for a run."""
    if not run.done():
        run.watch()
        yield Pending([], [], events=[Ended(run)], run=run)


def awaited(run: Any, coder: Coder) -> Steps:
    """Wait for a run, count what it did, and raise what went wrong."""
    yield from ended(run)
    failure = run.failure()
    if failure is not None:
        raise error_of(failure, coder)
    coder.call.tally(run.tally(), run.intervals())
