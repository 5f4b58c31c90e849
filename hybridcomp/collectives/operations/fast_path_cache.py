"""Cache the data with which compiled code repeats a communicator's operations on plain arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.engine.programs import START_SECONDS
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.requests import called_back
from hybridcomp.collectives.stats import Call, StatRow, StatTable
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

_MOST_OPERATIONS = 4096
_MOST_KINDS = 64  # kinds of arrays for each operation

# Key of an operation: its name; id of the reduction, or root; name, phase and codec; the algorithm of a collective.
Key = tuple[Any, ...]
CODEC = 4  # index of the codec, which is a key only if it is a string


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


# Kind of an operation on arrays: its statistics, and a program of the engine that runs it, or the arguments of MPI's
# function up to the communicator, with 0 for a buffer, a peer or a tag.
Kind = tuple[Call, list[int] | Any]
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

    Attributes:
        operations: cached operations by key.
        step: latest training step of an operation.
        settled_from: training step from which on the policy's answers no longer change.
        where: axis and rank of the operations, in words, for error messages.
        timeout: seconds that an operation may take.
    """

    def __init__(self, rank: int, table: StatTable) -> None:
        self.operations: dict[Key, Any] = {}
        self.step = self.settled_from = 0
        self.where, self.timeout = "", 0.0
        self._rank = rank
        self._table = table

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
            operation = self.operations[key] = kernels().MpiOperation(
                _library(),
                address(shape.function),
                send,
                recv,
                shape.request,
                what == "all_reduce",
                f"{what} {self.where}",
                self.timeout,
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
        counted: _Counted | None = None
        arguments: list[int] = []
        program = None
        if kind is not None:
            call, how = kind
            if isinstance(how, list):
                arguments = how
            else:
                program = how
            counted = (self._table.row(call), call.raw_bytes, call.plain_bytes, op)
        operation.learn(send, recv, counted, arguments, program)

    def settle(self) -> None:
        """Count the operations that have ended and are not counted yet."""
        for operation in list(self.operations.values()):
            self._settle(operation)

    def _settle(self, operation: Any) -> None:
        """Count the uncounted runs of an operation."""
        for (row, raw, plain, _), calls, seconds, tally in operation.take():
            self._table.count(row, calls, raw, plain, seconds, tally)

    def forget(self) -> None:
        """Count the operations that have ended, and drop the cache."""
        self.settle()
        self.operations.clear()


@functools.cache
def _library() -> Any:
    return kernels().MpiLibrary(
        address("MPI_Test"),
        np.ndarray,
        MPI.IN_PLACE,
        int(MPI.IN_PLACE),
        MPI.Exception,
        called_back,
        engine.engine().begun,
        START_SECONDS,
    )
