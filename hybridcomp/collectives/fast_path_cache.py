"""Cache the data with which compiled code repeats a communicator's operations on plain arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import DType
from hybridcomp.codecs.feedback.memory import Memory
from hybridcomp.collectives.datatypes import BY_DTYPE, BY_HANDLE, DATATYPES, FLOAT16
from hybridcomp.collectives.engine.programs import START_SECONDS
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.stats import Call, StatRow, StatTable, leaving
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

# MPI's datatypes of arrays that mpi4py reads as they are. MPI's 16-bit floats are reduced otherwise than ours.
_HANDLES = {dtype: DATATYPES[kind].handle for dtype, kind in BY_DTYPE.items() if kind is not DType.FLOAT16}
_MOST_OPERATIONS = 4096
_MOST_KINDS = 64  # kinds of arrays for each operation

# Key of an operation: its name; id of the reduction, or root; name, phase and codec; the algorithm of a collective.
Key = tuple[Any, ...]
CODEC = 4  # index of the codec, which is a key as a string or a codec, not as a choice


class Shape(NamedTuple):
    """Positions of the arguments of one of MPI's functions; -1 for an argument that it does not take.

    Attributes:
        function: name of the function.
        send, recv: positions of the buffers.
        request: position of the request, the last argument.
    """

    function: str
    send: int
    recv: int
    request: int


_SHAPES = {
    "all_reduce": Shape("MPI_Iallreduce", 0, 1, 6),
    "reduce_scatter": Shape("MPI_Ireduce_scatter_block", 0, 1, 6),
    "all_gather": Shape("MPI_Iallgather", 0, 3, 7),
    "all_to_all": Shape("MPI_Ialltoall", 0, 3, 7),
    "broadcast": Shape("MPI_Ibcast", -1, 0, 5),
    "barrier": Shape("MPI_Ibarrier", -1, -1, 1),
    "send": Shape("MPI_Isend", 0, -1, 6),
    "recv": Shape("MPI_Irecv", -1, 0, 6),
}


_IN_PLACE = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
)  # their send buffer may be MPI's IN_PLACE

# Kind of an operation on arrays: its statistics, and a program of the engine that runs it, or the arguments of MPI's
# function up to the communicator, with 0 for a buffer, a peer or a tag; for a program with error feedback, its memory.
Kind = tuple[Call, list[int] | Any] | tuple[Call, Any, Memory]
# Function that returns the kind of a key, two buffers and a reduction; None if neither MPI nor the engine can do it
# alone.
Ask = Callable[[Key, Any, Any, Any], Kind | None]
# Counting of operations of one kind: their row, the raw and plain bytes of each, and the reduction.
_Counted = tuple[StatRow, int, int, Any]


class ForOnceError(Exception):
    """Raised where the policy's answer is for the next operation alone, which takes the usual way, uncached."""


class Learnt:
    """Cached operations of one communicator, each with the kinds of arrays that it knows.

    Args:
        rank: number of this rank in the communicator.
        table: table of its statistics.
        away: for each rank, whether it is on another host.

    Attributes:
        operations: cached operations by key.
        step: latest training step of an operation.
        settled_from: training step from which on the policy's answers no longer change.
        where: axis and rank of the operations, in words, for error messages.
        timeout: seconds that an operation may take.
    """

    def __init__(self, rank: int, table: StatTable, away: list[bool]) -> None:
        self.operations: dict[Key, Any] = {}
        self.step = self.settled_from = 0
        self.where, self.timeout = "", 0.0
        self._rank = rank
        self._table = table
        self._away = away
        self._messages: dict[str, tuple[Any, str, str, str, bool]] = {}
        self._passed: dict[tuple[str, str, str], list[Any]] = {}

    def find(self, key: Key, step: int) -> Any:
        """Return the operation of a key, at a training step."""
        settled = self.settled_from
        if len(self.operations) >= _MOST_OPERATIONS or min(step, settled) != min(self.step, settled):
            self.forget()
        self.step = step
        operation = self.operations.get(key)
        if operation is None:
            what = key[0]
            shape = _SHAPES[what]
            send, recv = shape.send, shape.recv
            if what == "broadcast" and key[1] == self._rank:
                send, recv = recv, send  # the root's array may be read-only
            operation = self.operations[key] = kernels().LearntOperation(
                library(),
                address(shape.function),
                send,
                recv,
                shape.request,
                what in _IN_PLACE,
                f"{what} {self.where}",
                self.timeout,
                self._away,
            )
        return operation

    def learn(self, operation: Any, key: Key, ask: Ask, send: Any, recv: Any, op: Any) -> None:
        """Cache a key's operation on arrays such as these; keeping the reduction keeps its id from another object."""
        if operation.kinds() >= _MOST_KINDS:
            self._settle(operation)
            operation.forget()
        try:
            kind = ask(key, send, recv, op)
        except ForOnceError:
            return
        except Exception:  # the usual way raises it
            kind = None
        counted: _Counted | None = None
        arguments: list[int] = []
        program, memory = None, None
        if kind is not None:
            call, how, *memories = kind
            if isinstance(how, list):
                arguments = how
            else:
                program = how
                memory = memories[0] if memories else None
            counted = (self._table.row(call), call.raw_bytes, call.plain_bytes, op)
        aligned = max(alignment(send), alignment(recv))
        native = None if memory is None else memory.native
        operation.learn(send, recv, counted, arguments, program, aligned, native, memory)

    def passed(self, axis: str, op: str, reason: str) -> list[Any]:
        """Return the totals of operations of a kind that are passed to MPI, which the caller counts.

        They are calls, bytes of the values, bytes that are sent, seconds, and bytes that are sent to other hosts.
        """
        return self._passed.setdefault((axis, op, reason), [0, 0, 0, 0.0, 0])

    def watch(self, messages: Any, axis: str, op: str, reason: str, *, sends: bool) -> None:
        """Have the messages that compiled code starts be counted, with those before under another policy or axis."""
        before = self._messages.pop(op, None)
        if before is not None:
            self._count_messages(*before)
        self._messages[op] = messages, axis, op, reason, sends

    def _count_messages(self, messages: Any, axis: str, op: str, reason: str, sends: bool) -> None:
        calls, nbytes, between = messages.take()
        if calls:
            row = self._table.row(Call(axis, op, "none", reason, 0, 0))
            self._table.count_all(row, calls, nbytes, nbytes * sends, 0.0, between * sends)

    def settle(self) -> None:
        """Count the operations that have ended and are not counted yet."""
        for one in list(self._messages.values()):
            self._count_messages(*one)
        for (axis, op, reason), totals in self._passed.items():
            calls, raw, sent, seconds, between = totals
            totals[:] = 0, 0, 0, 0.0, 0
            if calls:
                row = self._table.row(Call(axis, op, "none", reason, 0, 0))
                self._table.count_all(row, calls, raw, sent, seconds, between)
        for operation in list(self.operations.values()):
            self._settle(operation)

    def _settle(self, operation: Any) -> None:
        """Count the uncounted runs of an operation."""
        for (row, raw, plain, _), calls, seconds, tally, away in operation.take():
            alone = row.op in ("send", "recv")
            between = away * plain if alone else leaving(calls * plain, self._away)
            self._table.count(row, calls, raw, plain, seconds, tally, between)

    def forget(self) -> None:
        """Count the operations that have ended, and drop the cache."""
        self.settle()
        self.operations.clear()


def alignment(spec: Any) -> int:
    """Return the bytes that a buffer's address must be a multiple of, for the kernels."""
    if isinstance(spec, np.ndarray):
        return int(spec.dtype.alignment)
    if isinstance(spec, list | tuple):
        return min(8, max(1, int(spec[-1].Get_size())))
    return 1


@functools.cache
def library() -> Any:
    """Return the functions and objects of MPI that compiled code needs."""
    return kernels().MpiLibrary(
        address("MPI_Test"),
        np.ndarray,
        MPI.Datatype,
        MPI.IN_PLACE,
        int(MPI.IN_PLACE),
        MPI.Exception,
        progress.engine().begun,
        START_SECONDS,
        _HANDLES,
        [*((handle, dtype.itemsize) for handle, dtype in BY_HANDLE.items()), (FLOAT16.handle, 0)],
        MPI._addressof(MPI.BYTE) - id(MPI.BYTE),
        MPI._sizeof(MPI.Datatype),
        MPI.Request,
        MPI._addressof(MPI.REQUEST_NULL) - id(MPI.REQUEST_NULL),
    )
