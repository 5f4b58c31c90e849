"""Run schedules on host memory: compile them once, start them on arrays, and wait for what they come to."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hybridcomp import native, trace
from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, Memory
from hybridcomp.codecs.sparse import SparseCodec
from hybridcomp.collectives.choosing import Chooser
from hybridcomp.collectives.coding import Coder
from hybridcomp.collectives.exact import AVG
from hybridcomp.collectives.execution.faults import error_of
from hybridcomp.collectives.request import Pending, Steps
from hybridcomp.native import kernels
from hybridcomp.policy import Choice
from hybridcomp.schedules.schedule import Operation, Schedule
from hybridcomp.schedules.topology import Topology

_MOST_PROGRAMS = 1024
_STREAM_BYTES = 1 << 23  # results from here on are written past the caches
_START_SECONDS = 100e-6  # that an operation computes before its start returns


class Ended:
    """The end of a run, as steps wait for it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._run.done())


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

    def all_reduce(
        self, choice: Choice, flat: Flat, op: Any, form: str | None, algorithm: str | None = None
    ) -> Any:
        """The program of an all-reduce of arrays like ``flat``; None where the engine does not do it.

        Args:
            choice: codec of the message.
            flat: one of the arrays.
            op: the reduction.
            form: of the message's memory of error feedback; None if it has none.
            algorithm: the caller's, for what is compressed; None to choose.

        Raises:
            ValueError: the algorithm cannot be used here.
        """
        codec, dtype, plain = choice.codec, flat.dtype, not choice.compresses
        if not dtype.is_float or op not in (MPI.SUM, AVG) or codec.linear:
            return None
        if not plain and codec.encoder is None:
            return None
        if form is not None and codec.at_step(1) is not codec:
            return None  # a codec for each step would be a program for each
        if isinstance(codec, SparseCodec) and dtype is not dtype.accumulator:
            return None  # their values are not widened by compiled code
        asked = None if plain else algorithm
        way = self._chooser.choose(
            "all_reduce", flat.nbytes, dtype, codec, form, asked, engine=True, plain=plain
        )
        if way.algorithm.schedule is None:
            return None
        mean = op == AVG
        key = (way.algorithm.name, flat.size, dtype, codec, mean, form is not None, way.chunk_bytes)
        program = self._programs.get(key)
        if program is None:
            operation = Operation(
                "all_reduce",
                (flat.size,),
                dtype.itemsize,
                plain=plain,
                exact=codec.lossless,
                feedback=form is not None,
                mean=mean,
                chunk_bytes=way.chunk_bytes,
            )
            schedule = way.algorithm.schedule(operation, self._topology, self._rank)
            program = self._compile(schedule, None if plain else codec, flat, (flat.size, flat.size))
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = program
        return program

    def _compile(self, schedule: Schedule, codec: Codec | None, flat: Flat, sizes: tuple[int, int]) -> Any:
        steps, slots, lists = schedule.packed()
        return kernels().engine_program(
            self.group,
            None if codec is None else codec.encoder,
            0 if codec is None else codec.wire_id,
            0 if codec is None else codec.params_hash,
            flat.dtype,
            schedule.ranks,
            flat.nbytes >= _STREAM_BYTES,
            flat.nbytes,
            steps,
            slots,
            lists,
            (*sizes, schedule.scratch),
        )


def running(program: Any, send: Flat, recv: Flat, coder: Coder, memory: Memory | None = None) -> Steps:
    """Run a program on two arrays in host memory, with a memory of error feedback whose step has begun.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    address = native.kernels().address
    traced = trace.recorder is not None
    native_memory = None if memory is None else memory.native
    kept = (send.data, recv.data, memory)
    run = kernels().engine_start(
        program, address(send.data), address(recv.data), native_memory, kept, _START_SECONDS, traced
    )
    yield from awaited(run, coder)


def awaited(run: Any, coder: Coder) -> Steps:
    """Wait for a run, count what it did, and raise what went wrong."""
    if not run.done():
        run.watch()
        yield Pending([], [], events=[Ended(run)], run=run)
    failure = run.failure()
    if failure is not None:
        raise error_of(failure, coder)
    coder.call.tally(run.tally(), run.intervals())
