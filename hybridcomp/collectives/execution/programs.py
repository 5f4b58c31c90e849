"""Run schedules on host memory: compile them once, start them on arrays, and wait for what they come to."""

from __future__ import annotations

from typing import Any

from hybridcomp import native, trace
from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, Memory
from hybridcomp.collectives.choosing import Way
from hybridcomp.collectives.coding import Coder
from hybridcomp.collectives.execution.faults import error_of
from hybridcomp.collectives.request import Pending, Steps
from hybridcomp.native import kernels
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
    """

    def __init__(self, group: Any, topology: Topology, rank: int) -> None:
        self.group = group
        self._topology = topology
        self._rank = rank
        self._programs: dict[tuple[Any, ...], Any] = {}

    def all_reduce(self, way: Way, flat: Flat, codec: Codec, *, mean: bool, feedback: bool) -> Any:
        """The program of an all-reduce of arrays like ``flat``, by an algorithm that has a schedule."""
        key = (way.algorithm.name, flat.size, flat.dtype, codec, mean, feedback, way.chunk_bytes)
        program = self._programs.get(key)
        if program is None:
            plain = codec.name == "none"
            operation = Operation(
                "all_reduce",
                (flat.size,),
                flat.dtype.itemsize,
                plain=plain,
                exact=codec.lossless,
                feedback=feedback,
                mean=mean,
                chunk_bytes=way.chunk_bytes,
            )
            assert way.algorithm.schedule is not None
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
