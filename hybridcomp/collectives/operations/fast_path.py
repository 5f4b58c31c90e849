"""Blocking operations on plain arrays that need no Python: MPI's own, and programs of the compiled engine.

A small message takes a few microseconds, and so does starting an operation. Where the policy leaves an array as it is,
the compiled module posts MPI's non-blocking operation at once and looks at it for a moment; what takes longer goes to
the engine, which gives up the core, and ends it in time. Nobody overtakes: where an operation waits in line to be
posted, the next one takes the usual way. So it does while MPI may call Python (:mod:`~.requests`):
it is entered here without giving up the interpreter.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.arrays import DType
from hybridcomp.collectives.buffers import parse
from hybridcomp.collectives.choices import codec_of
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.execution.coding import Coder
from hybridcomp.collectives.execution.data_path import Carrier
from hybridcomp.collectives.execution.library import address
from hybridcomp.collectives.execution.messages import received
from hybridcomp.collectives.execution.programs import awaited
from hybridcomp.collectives.execution.progress import Pending, Steps
from hybridcomp.collectives.execution.request import sender
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.operations.flat_reductions import Core
from hybridcomp.collectives.requests import called_back
from hybridcomp.collectives.stats import Call, StatRow, record
from hybridcomp.collectives.transport.framing import encoded
from hybridcomp.errors import MismatchError
from hybridcomp.native import kernels

_MOST_OPERATIONS = 4096
_MOST_KINDS = 64  # of arrays, for each

# Operation; id of the reduction, or root; name, phase and codec; of a collective the algorithm.
Key = tuple[Any, ...]


class Shape(NamedTuple):
    """Where one of MPI's functions has its arguments; -1 if it has none.

    Attributes:
        function: its name.
        send, recv: places of the buffers.
        request: of the request, the last.
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


# What an operation on arrays is counted as, and what does it: a program of the engine, or MPI's function with these
# arguments up to the communicator, 0 where a buffer, a peer or a tag goes.
Kind = tuple[Call, list[int] | Any]
# Which kind a key, two buffers and a reduction make; None if it is not for MPI alone.
Ask = Callable[[Key, Any, Any, Any], Kind | None]
# How those of one kind are counted: their row, and the raw and plain bytes of each; and the reduction.
_Counted = tuple[StatRow, int, int, Any]


class Quick(Core):
    """A communicator whose blocking operations on plain arrays are quick."""

    def __init__(
        self, comm: MPI.Comm, policy: Any, axis: str, timeout: float, detail: bool | None = None
    ) -> None:
        super().__init__(comm, policy, axis, timeout, detail)
        self._operations: dict[Key, Any] = {}
        self._step_asked = self.step  # at which the policy was asked about all of them
        self._recorder = trace.recorder
        # As if one were always in line, the usual way is taken by operations that are compared in detail, and by all
        # of a policy that asks where in a model they belong: what is learnt of an array here does not know.
        detail, places = self._comparison is not None, self.policy.places
        self._line = deque([None]) if detail or places else self._transport.turns.line
        self._message_line = deque([None]) if places else self._p2p_transport.turns.line
        self._met = self._p2p_transport.contacts.met  # a first message may take MPI for ever
        self._compressed_from = self.policy.least_bytes(axis, "send")

    def Free(self) -> None:
        """Release MPI's resources; no operation may be in flight. Collective."""
        self._forget()
        super().Free()

    def stats(self) -> list[StatRow]:
        """Totals per operation and codec since the communicator was made, on this rank."""
        for operation in list(self._operations.values()):
            self._settle(operation)
        return super().stats()

    @staticmethod
    def _may_be_quick(line: deque[Any], codec: Any) -> bool:
        """Tell whether an operation may be one native call: its codec is a key, and nobody is in line."""
        return not line and (codec is None or isinstance(codec, str))

    def _done(self, key: Key, ask: Ask, send: Any = None, recv: Any = None, op: Any = None) -> bool:
        """Do a collective on two buffers; False if it must take the usual way."""
        notices = self._notices
        if called_back or (notices is not None and (notices.troubled or notices.belated)):
            return False
        recorder = trace.recorder
        if recorder is not self._recorder:
            self._begin_trace(recorder)
        operation = self._operations.get(key)
        if operation is None or self.step != self._step_asked:
            operation = self._operation(key)
        # Python answers a signal as a call is over, and the call's result would be lost: unpacking is no call.
        (done,) = map(operation.start, (send,), (recv,))
        if done is None:
            self._learn(operation, key, ask, send, recv, op)
            (done,) = map(operation.start, (send,), (recv,))
        if done is True:
            self._started += 1
            if notices is not None:  # whoever waits for this rank later is told where it is
                notices.latest = self._started
            if recorder is not None:
                self._trace(operation, recorder)
            return True
        if not done:
            return False
        left = [done]
        try:
            self._await(left, (send, recv))
        except KeyboardInterrupt:
            self._adopt(left, (send, recv))
            raise
        return True

    def _sent(self, key: Key, ask: Ask, array: Any, peer: int, tag: int, status: MPI.Status | None) -> bool:
        """Send or receive an array; False if it must take the usual way."""
        if called_back:
            return False
        recorder = trace.recorder
        if recorder is not self._recorder:
            self._begin_trace(recorder)
        operation = self._operations.get(key)
        if operation is None or self.step != self._step_asked:
            operation = self._operation(key)
        checked = self._compressed_from is not None and key[0] == "recv"
        if checked and status is None:
            status = MPI.Status()
        at = 0 if status is None else MPI._addressof(status)
        try:
            (done,) = map(operation.message, (array,), (peer,), (tag,), (at,))
            if done is None:
                self._learn(operation, key, ask, array, array, None)
                (done,) = map(operation.message, (array,), (peer,), (tag,), (at,))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise self._too_large(peer, str(error)) from None
        if not done:
            return False
        if done is not True:
            left = [done]
            try:
                self._await(left, array, peer, status)
            except KeyboardInterrupt:
                self._adopt(left, array, peer, status)
                raise
        elif recorder is not None:
            self._trace(operation, recorder)
        if checked and status is not None and array.dtype.kind == "f" and encoded(status.Get_count(MPI.BYTE)):
            # Of what is compressed, a larger array, whose message happens to fit.
            raise self._too_large(status.Get_source(), "it is compressed")
        return True

    def _too_large(self, peer: int, why: str) -> MismatchError:
        what = f"recv on axis {self.axis!r}, rank {self.rank} of {self.size}"
        return MismatchError(f"{what}: {sender(peer)} sent more than this rank has room for ({why})")

    def _await(
        self, left: list[Any], keep: Any, peer: int | None = None, status: MPI.Status | None = None
    ) -> None:
        """Have the engine wait for what was posted, with ``peer`` or with all ranks, and count it."""
        with deferral:
            request = self._hand_over(left, keep, peer, status)
        request.wait()

    def _hand_over(
        self, left: list[Any], keep: Any, peer: int | None, status: MPI.Status | None
    ) -> engine.Request:
        handle, (row, raw, plain, _) = left.pop()
        call = Call(row.axis, row.op, row.codec, row.reason, raw, plain)
        if not isinstance(handle, int):  # a run of the engine
            steps = self._rest(handle, call, keep, status)
            return self._start(steps, call, status=status, common=peer is None)
        request = MPI.Request.fromhandle(handle)
        steps = _remaining(request, -1 if peer is None else peer, status, keep, sends=call.op == "send")
        return self._start(steps, call, exact=True, status=status, common=peer is None)

    def _rest(self, run: Any, call: Call, keep: Any, status: MPI.Status | None) -> Steps:
        """Wait for a run of the engine, and end the operation."""
        codec = codec_of(call.codec)
        if call.op == "recv":
            out = parse(keep, writable=True)
            carrier = Carrier(self._p2p_transport, codec, out.dtype, call)
            return received(run, out, MPI.Status() if status is None else status, carrier)
        transport = self._p2p_transport if call.op == "send" else self._transport
        return awaited(run, Coder(transport, codec, DType.FLOAT32, call))

    def _adopt(
        self, left: list[Any], keep: Any, peer: int | None = None, status: MPI.Status | None = None
    ) -> None:
        """Go on with what a signal has kept from the engine."""
        with deferral:
            if left:
                self._hand_over(left, keep, peer, status)

    def _operation(self, key: Key) -> Any:
        if len(self._operations) >= _MOST_OPERATIONS or self.step != self._step_asked:
            self._forget()
            self._step_asked = self.step
        operation = self._operations.get(key)
        if operation is None:
            what = key[0]
            shape = _SHAPES[what]
            send, recv = shape.send, shape.recv
            if what == "broadcast" and key[1] == self.rank:
                send, recv = recv, send  # the root's array may be read-only
            operation = self._operations[key] = kernels().MpiOperation(
                _library(), address(shape.function), send, recv, shape.request, what == "all_reduce"
            )
        return operation

    def _learn(self, operation: Any, key: Key, ask: Ask, send: Any, recv: Any, op: Any) -> None:
        """Tell a key's operation of arrays such as these; one that is kept has no other's id."""
        if operation.kinds() >= _MOST_KINDS:
            self._settle(operation)
            operation.forget()
        kind = ask(key, send, recv, op)
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

    def _settle(self, operation: Any) -> None:
        """Count what an operation has not counted yet."""
        for (row, raw, plain, _), calls, seconds, tally in operation.take():
            self._table.count(row, calls, raw, plain, seconds, tally)

    def _begin_trace(self, recorder: trace.Recorder | None) -> None:
        """Count what has ended so far: the trace that begins is not to show it."""
        self._recorder = recorder
        for operation in list(self._operations.values()):
            self._settle(operation)

    def _trace(self, operation: Any, recorder: trace.Recorder) -> None:
        """Count and record the operation that has just ended."""
        ended = time.perf_counter()
        for (row, raw, plain, _), calls, seconds, tally in operation.take():
            self._table.count(row, calls, raw, plain, seconds, tally)
            wire = plain if tally is None else tally[0]
            one = replace(row, raw_bytes=raw, plain_bytes=plain, wire_bytes=wire)
            record(recorder, one, ended - seconds, ended)

    def _forget(self) -> None:
        for operation in self._operations.values():
            self._settle(operation)
        self._operations.clear()


def _remaining(
    request: MPI.Request, peer: int, status: MPI.Status | None, keep: Any, *, sends: bool
) -> Steps:
    # `keep` is what MPI may still write to.
    yield Pending([request], [peer], None if status is None else [status], sends=sends)


@functools.cache
def _library() -> Any:
    return kernels().MpiLibrary(
        address("MPI_Test"), np.ndarray, MPI.IN_PLACE, int(MPI.IN_PLACE), MPI.Exception
    )
