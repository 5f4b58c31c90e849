"""Start operations on plain arrays in compiled code: MPI's own, and programs of the compiled engine.

A small message takes a few microseconds, and so does starting an operation. The policy's answer for arrays of a kind is
learnt once; then the compiled module posts MPI's non-blocking operation, or starts the program, at once. A blocking
call polls it for a moment; an operation that takes longer, or that no thread waits for yet, becomes a request of the
engine, which gives up the core, and ends it in time. No operation overtakes another: where one waits to be posted, the
next one takes the usual way.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from typing import Any

from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.collectives.agreement.making import Founding
from hybridcomp.collectives.buffers import datatype_of, parse
from hybridcomp.collectives.choices import codec_of
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import Coder
from hybridcomp.collectives.data_path.framing import encoded
from hybridcomp.collectives.datatypes import BY_HANDLE
from hybridcomp.collectives.engine.messages import received
from hybridcomp.collectives.engine.programs import awaited, ended
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.execution.steps import Pending, Steps, sender
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.mpi_starting import MpiStarter
from hybridcomp.collectives.operations.fast_path_cache import CODEC, Ask, Key, Learnt
from hybridcomp.collectives.requests import wait_for
from hybridcomp.collectives.stats import Call, Stats, leaving
from hybridcomp.errors import MismatchError
from hybridcomp.native import kernels
from hybridcomp.top.publish import Activity, hide, show

_CLOSED: deque[Any] = deque([None])  # a queue that is never empty: the fast path stays closed
_all: weakref.WeakSet[FastPath] = weakref.WeakSet()


def _forked() -> None:
    """Leave all operations to the engine, whose error says that MPI belongs to the parent process."""
    for comm in _all:
        comm._waiting = comm._messages_waiting = _CLOSED
        comm._sends = comm._receives = None


os.register_at_fork(after_in_child=_forked)

# Rest of an operation that compiled code has posted: its flight, or True if it has ended, or MPI's error; its buffers;
# the peer of a send or a receive; the status of a receive. A plain tuple, since making one is no call, after which a
# signal's handler could be called.
_Left = tuple[Any, Any, int | None, MPI.Status | None]


class FastPath(MpiStarter):
    """Communicator whose operations on plain arrays start on a native fast path."""

    _sends: Any = None  # starts of messages that are MPI's alone, in compiled code
    _receives: Any = None

    def __init__(
        self, comm: MPI.Comm | Founding, policy: Any, axis: str, timeout: float, detail: bool | None = None
    ) -> None:
        super().__init__(comm, policy, axis, timeout, detail)
        self._learnt = Learnt(self.rank, self._table, self._away)
        self._operations = self._learnt.operations
        self._met = self.message_transport.contacts.met  # in a rank's first message MPI may stay for ever
        self._flight = kernels().Flight
        self._reconsider()
        _all.add(self)
        world = MPI.COMM_WORLD
        self._shown = show(self, self._table.rows, world.Get_rank(), world.Get_size())

    def _reconsider(self) -> None:
        """Drop the cached operations, and read again policy, axis and timeout."""
        self._learnt.forget()
        self._learnt.where = f"on axis {self.axis!r}, rank {self.rank} of {self.size}"
        self._learnt.timeout = self.timeout
        self._learnt.settled_from = self.policy.last_change
        # Operations that are compared in detail always take the usual way, and so do all operations of a policy that
        # asks for their place in a model, which is no part of the knowledge cached here.
        closed = self.policy.places or self._freed
        detail = self._comparison is not None
        self._waiting = _CLOSED if detail or closed else self.transport.post_queue.tickets
        self._messages_waiting = _CLOSED if closed else self.message_transport.post_queue.tickets
        self._compressed_from = self.policy.least_bytes(self.axis, "send")

    def Free(self) -> None:
        """Release MPI's resources, once no operation is in flight. Collective."""
        hide(self._shown)
        super().Free()

    def stats(self) -> Stats:
        """Return totals per operation and codec since the communicator was made, on this rank."""
        self._learnt.settle()
        return super().stats()

    def activity(self) -> Activity:
        """Return the activity of the communicator that ``hybridcomp top`` shows; may be called by any thread."""
        self._learnt.settle()
        return super().activity()

    def _done(self, key: Key, ask: Ask, send: Any = None, recv: Any = None, op: Any = None) -> bool:
        """Run a collective on two buffers; return False if it must take the usual path."""
        notices, codec = self._notices, key[CODEC]
        if self._waiting or self._started >= self._review_at:
            return False
        if codec is not None and not _is_key(codec):
            return False
        if notices is not None and (notices.troubled or notices.belated):
            return False
        if trace.recorder is not None:
            return False
        operation = self._operations.get(key)
        if operation is None or self.step != self._learnt.step:
            operation = self._learnt.find(key, self.step)
        # Python calls a signal's handler at the end of a call, whose result would be lost: unpacking is no call.
        (done,) = map(operation.start, (send,), (recv,))
        if done is None:
            self._learnt.learn(operation, key, ask, send, recv, op)
            (done,) = map(operation.start, (send,), (recv,))
        if done is True:
            self._started += 1
            if notices is not None:  # a rank that waits for this one later is told how far it is
                notices.latest = self._started
            return True
        if not done:
            return False
        left: list[_Left] = [(done, (send, recv), None, None)]
        try:
            self._await(left)
        except BaseException:  # a signal's handler raised it before the engine has the operation
            self._hand_over(left)
            raise
        return True

    def _begun(
        self,
        key: Key,
        ask: Ask,
        arguments: tuple[Any, ...] = (None, None),
        op: Any = None,
        peer: int | None = None,
        status: MPI.Status | None = None,
    ) -> engine.Request | None:
        """Start an operation, without waiting for it; None if it must take the usual way.

        Args:
            key: key of the operation.
            ask: function that finds its kind.
            arguments: two buffers; or with a ``peer`` the array, the peer and the tag.
            op: reduction operator.
            peer: peer of a send or a receive; None for a collective.
            status: status of a receive.
        """
        notices, waiting = (self._notices, self._waiting) if peer is None else (None, self._messages_waiting)
        codec = key[CODEC]
        if waiting or (peer is None and self._started >= self._review_at):
            return None
        if codec is not None and not _is_key(codec):
            return None
        if trace.recorder is not None or self.on_start is not None:
            return None
        if notices is not None and (notices.troubled or notices.belated):
            return None
        operation = self._operations.get(key)
        if operation is None or self.step != self._learnt.step:
            operation = self._learnt.find(key, self.step)
        flight = self._flight()
        number = 1 + (self._started if peer is None else self._messages)
        request = engine.Request(
            self._engine,
            self._flown((flight, arguments if peer is None else arguments[0], peer, status)),
            (key[0], number, self._axis, self._rank, self._size),
            self._timeout,
            status=status,
            notices=notices,
            number=number,
            communicator=self.key,
        )
        begin = operation.begin if peer is None else operation.begin_message
        try:
            (begun,) = itertools.starmap(begin, ((*arguments, flight, request),))
            if begun is None:
                send, recv = arguments if peer is None else (arguments[0], arguments[0])
                self._learnt.learn(operation, key, ask, send, recv, op)
                (begun,) = itertools.starmap(begin, ((*arguments, flight, request),))
        except Exception as error:
            if peer is None:
                self._refuse(error)
            raise
        if not begun:
            return None
        if peer is None:
            self._started = number
        else:
            self._messages = number
        # From here on the engine has the operation, even if a signal's handler raises an error.
        request.run = flight.run
        request.priority = flight.note[1].bit_length()
        self._engine.poll_soon()
        if peer is not None and flight.run is not None and flight.run.failure() is not None:
            self._engine.poll()
            request.raise_refusal()
        return request

    def _sent(self, key: Key, ask: Ask, array: Any, peer: int, tag: int, status: MPI.Status | None) -> bool:
        """Send or receive an array; False if it must take the usual way."""
        codec = key[CODEC]
        if self._messages_waiting or (codec is not None and not _is_key(codec)):
            return False
        if trace.recorder is not None:
            return False
        operation = self._operations.get(key)
        if operation is None or self.step != self._learnt.step:
            operation = self._learnt.find(key, self.step)
        checked = self._compressed_from is not None and key[0] == "recv"
        if checked and status is None:
            status = MPI.Status()
        at = 0 if status is None else MPI._addressof(status)
        try:
            (done,) = map(operation.message, (array,), (peer,), (tag,), (at,))
            if done is None:
                self._learnt.learn(operation, key, ask, array, array, None)
                (done,) = map(operation.message, (array,), (peer,), (tag,), (at,))
        except MPI.Exception as error:
            raise self._explained(error, peer) from None
        if not done:
            return False
        if done is not True:
            left: list[_Left] = [(done, array, peer, status)]
            try:
                self._await(left, tag if key[0] == "recv" else None)
            except BaseException:  # a signal's handler raised it before the engine has the operation
                self._hand_over(left)
                raise
        if checked:
            self._check_plain(array, status)
        return True

    def _exchanged(
        self,
        keys: tuple[Key, Key],
        ask: Ask,
        outgoing: tuple[Any, int, int],
        incoming: tuple[Any, int, int],
        status: MPI.Status | None,
    ) -> bool:
        """Send and receive at once; False if both must take the usual way.

        Args:
            keys: keys of the send and of the receive.
            ask: function that finds their kinds.
            outgoing, incoming: an array, its peer and its tag.
            status: status of the receive.
        """
        sending, receiving = keys
        codec = sending[CODEC]
        if self._messages_waiting or (codec is not None and not _is_key(codec)):
            return False
        if trace.recorder is not None:
            return False
        sends, receives = self._operations.get(sending), self._operations.get(receiving)
        if sends is None or receives is None or self.step != self._learnt.step:
            sends, receives = self._learnt.find(sending, self.step), self._learnt.find(receiving, self.step)
        checked = self._compressed_from is not None
        if checked and status is None:
            status = MPI.Status()
        arguments = (sends, *outgoing, *incoming, 0 if status is None else MPI._addressof(status))
        (done,) = itertools.starmap(receives.exchange, (arguments,))
        if done is None:
            for operation, key, array in (sends, sending, outgoing[0]), (receives, receiving, incoming[0]):
                if not operation.knows(array, array):
                    self._learnt.learn(operation, key, ask, array, array, None)
            (done,) = itertools.starmap(receives.exchange, (arguments,))
        if not done:
            return False
        if done is not True:
            left: list[_Left] = [
                (done[0], incoming[0], incoming[1], status),
                (done[1], outgoing[0], outgoing[1], None),
            ]
            try:
                self._await(left, incoming[2])
            except BaseException:  # a signal's handler raised it before the engine has the operation
                self._hand_over(left)
                raise
        if checked:
            self._check_plain(incoming[0], status)
        return True

    def _check_plain(self, buf: Any, status: MPI.Status | None) -> None:
        """Refuse compressed data: they are of a larger array, whose message happens to fit."""
        if status is not None and _is_float(buf) and encoded(status.Get_count(MPI.BYTE)):
            raise self._too_large(status.Get_source(), "it is compressed")

    def _explained(self, error: MPI.Exception, peer: int) -> Exception:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            return error
        return self._too_large(peer, str(error))

    def _too_large(self, peer: int, why: str) -> MismatchError:
        what = f"recv on axis {self.axis!r}, rank {self.rank} of {self.size}"
        return MismatchError(f"{what}: {sender(peer)} sent more than this rank has room for ({why})")

    def _await(self, left: list[_Left], tag: int | None = None) -> None:
        """Wait in the engine for blocking operations that have not ended; the first one may be a receive of a tag.

        Raises:
            MPI.Exception, MismatchError: MPI has refused one of them, so that it has an error instead of a flight.
        """
        refused = [(code, peer) for code, _, peer, _ in left if isinstance(code, int)]
        first = left[0]
        requests = self._hand_over(left)
        for code, peer in refused:
            if code is not True:
                raise self._explained(MPI.Exception(code), -1 if peer is None else peer)
        if tag is not None and not isinstance(first[0], int):
            requests[0] = self._posted_late(requests[0], first[1], first[2], tag, first[3])
        wait_for(requests, None)

    def _posted_late(
        self, request: engine.Request, buf: Any, source: int | None, tag: int, status: MPI.Status | None
    ) -> engine.Request:
        """Return the request of a receive that MPI has; a subclass takes it back where its message is elsewhere."""
        return request

    def _hand_over(self, left: list[_Left]) -> list[engine.Request]:
        """Make requests of the operations left, with which the engine goes on even if a signal's handler raises."""
        requests = []
        with deferral:
            while left:
                flight, _, peer, status = one = left.pop(0)
                if isinstance(flight, int):
                    continue
                row, raw, plain, _ = flight.note
                call = Call(row.axis, row.op, row.codec, row.reason, raw, plain)
                common, exact = peer is None, flight.run is None
                requests.append(
                    self.start_steps(
                        self._flown(one),
                        call,
                        exact=exact,
                        status=status,
                        common=common,
                        counted=False,
                        run=flight.run if common else None,
                    )
                )
        return requests

    def _flown(self, left: _Left) -> Steps:
        """Wait for an operation that compiled code has posted, and count it."""
        flight, keep, peer, status = left
        row, raw, plain, _ = flight.note
        run = flight.run
        if run is not None and row.op != "recv":
            if not run.done():
                yield from ended(run)
            if run.failure() is None:
                self._table.count(row, 1, raw, plain, time.perf_counter() - flight.began, run.tally())
                return
        call = Call(row.axis, row.op, row.codec, row.reason, raw, plain)
        call.starts(flight.began)
        if run is None:
            call.wire_bytes, call.between_bytes = plain, leaving(plain, self._away, peer)
            request = MPI.Request.fromhandle(flight.request)
            statuses = [MPI.Status() if status is None else status] if call.op == "recv" else None
            yield Pending([request], [-1 if peer is None else peer], statuses, sends=call.op == "send")
        elif call.op == "recv":
            out = parse(keep, writable=True)
            carrier = Carrier(self.message_transport, codec_of(call.codec), out.dtype, call)
            yield from received(run, out, MPI.Status() if status is None else status, carrier)
        else:
            transport = self.message_transport if call.op == "send" else self.transport
            yield from awaited(run, Coder(transport, codec_of(call.codec), DType.FLOAT32, call))
        self._table.add(call)


def _is_key(codec: Any) -> bool:
    """Tell whether a codec that a call asks for may be in the key of a cached operation: a choice may not."""
    return codec.__class__ is str or isinstance(codec, Codec)


def _is_float(buf: Any) -> bool:
    """Tell whether a buffer has floats, of which messages may be compressed."""
    datatype = datatype_of(buf)
    dtype = None if datatype is None else BY_HANDLE.get(datatype.handle)
    return dtype is not None and dtype.is_float
