"""Start operations on plain arrays in compiled code: MPI's own, and programs of the compiled engine.

A small message takes a few microseconds, and so does starting an operation. The policy's answer for arrays of a kind
is learnt once; then the compiled module posts MPI's non-blocking operation, or starts the program, at once, with the
memory of error feedback that the name has. A blocking call polls it for a moment; an operation that takes longer, or
that no thread waits for yet, becomes a request of the engine, which gives up the core, and ends it in time. No
operation overtakes another: where one waits to be posted, the next one takes the usual way.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.collectives.buffers import datatype_of, parse
from hybridcomp.collectives.choices import codec_of
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import Coder
from hybridcomp.collectives.data_path.framing import encoded
from hybridcomp.collectives.datatypes import BY_HANDLE
from hybridcomp.collectives.engine.messages import received
from hybridcomp.collectives.engine.programs import awaited, ended
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.signals import deferral
from hybridcomp.collectives.fast_path_cache import CODEC, Key, Kind
from hybridcomp.collectives.operations.probes import posted_late
from hybridcomp.collectives.requests import wait_for
from hybridcomp.collectives.session import Session
from hybridcomp.collectives.stats import Call, leaving
from hybridcomp.native import kernels

_CLOSED: deque[Any] = deque([None])  # a queue that is never empty: the fast path stays closed

# Function that returns the kind of a key, two buffers and a reduction in a session; None if neither MPI nor the engine
# can do it alone.
_Ask = Callable[[Session, Key, Any, Any, Any], Kind | None]

# Rest of an operation that compiled code has posted: its flight, or True if it has ended, or MPI's error; its buffers;
# the peer of a send or a receive; the status of a receive. A plain tuple, since making one is no call, after which a
# signal's handler could be called.
_Left = tuple[Any, Any, int | None, MPI.Status | None]


class FastPath:
    """Native path of a communicator's operations on plain arrays.

    Attributes:
        waiting, messages_waiting: what waits to be posted, of collectives and of messages: then the path is closed.
        met: ranks to which this one has sent a message: in the first one MPI may stay for ever.
    """

    def __init__(self, session: Session) -> None:
        """Set up the path of a communicator; its :class:`.PassThrough` opens it, and does so anew after changes."""
        self._session = session
        self._learnt = session.learnt
        self._operations = session.learnt.operations
        self._engine = progress.engine()
        self._rank, self._size = session.rank, session.size
        self.met = session.message_transport.contacts.met
        self._flight = kernels().Flight
        self.waiting: Any = _CLOSED
        self.messages_waiting: Any = _CLOSED

    def reconsider(self) -> None:
        """Open the path, unless the policy, or the communicator's end, keeps it closed."""
        session = self._session
        self._axis, self._timeout = session.axis, session.timeout
        # Operations that are compared in detail always take the usual way, and so do all operations of a policy that
        # asks for their place in a model, which is no part of the knowledge cached here.
        closed = session.policy.places or session.freed
        detail = session.comparison is not None
        self.waiting = _CLOSED if detail or closed else session.transport.post_queue.tickets
        self.messages_waiting = _CLOSED if closed else session.message_transport.post_queue.tickets

    def close(self) -> None:
        """Leave all operations to the engine."""
        self.waiting = self.messages_waiting = _CLOSED

    def done(self, key: Key, ask: _Ask, send: Any = None, recv: Any = None, op: Any = None) -> bool:
        """Run a collective on two buffers; return False if it must take the usual path."""
        session = self._session
        notices, codec = session.notices, key[CODEC]
        if self.waiting or session.started >= session.review_at:
            return False
        if codec is not None and not _is_key(codec):
            return False
        if notices is not None and (notices.troubled or notices.belated):
            return False
        if trace.recorder is not None or session.on_start is not None:
            return False
        operation = self._operations.get(key)
        if operation is None or session.step != self._learnt.step:
            operation = self._learnt.find(key, session.step)
        # Python calls a signal's handler at the end of a call, whose result would be lost: unpacking is no call.
        (done,) = map(operation.start, (send,), (recv,))
        if done is None:
            self._learnt.learn(operation, key, functools.partial(ask, session), send, recv, op)
            (done,) = map(operation.start, (send,), (recv,))
        if done is True:
            session.started += 1
            if notices is not None:  # a rank that waits for this one later is told how far it is
                notices.latest = session.started
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

    def begun(
        self,
        key: Key,
        ask: _Ask,
        arguments: tuple[Any, ...] = (None, None),
        op: Any = None,
        peer: int | None = None,
        status: MPI.Status | None = None,
    ) -> progress.Request | None:
        """Start an operation, without waiting for it; None if it must take the usual way.

        Args:
            key: key of the operation.
            ask: function that finds its kind.
            arguments: two buffers; or with a ``peer`` the array, the peer and the tag.
            op: reduction operator.
            peer: peer of a send or a receive; None for a collective.
            status: status of a receive.
        """
        session = self._session
        notices, waiting = (session.notices, self.waiting) if peer is None else (None, self.messages_waiting)
        codec = key[CODEC]
        if waiting or (peer is None and session.started >= session.review_at):
            return None
        if codec is not None and not _is_key(codec):
            return None
        if trace.recorder is not None or session.on_start is not None:
            return None
        if notices is not None and (notices.troubled or notices.belated):
            return None
        operation = self._operations.get(key)
        if operation is None or session.step != self._learnt.step:
            operation = self._learnt.find(key, session.step)
        flight = self._flight()
        number = 1 + (session.started if peer is None else session.messages)
        request = progress.Request(
            self._engine,
            self._flown((flight, arguments if peer is None else arguments[0], peer, status)),
            (key[0], number, self._axis, self._rank, self._size),
            self._timeout,
            status=status,
            notices=notices,
            number=number,
            communicator=session.key,
        )
        begin = operation.begin if peer is None else operation.begin_message
        try:
            (begun,) = itertools.starmap(begin, ((*arguments, flight, request),))
            if begun is None:
                send, recv = arguments if peer is None else (arguments[0], arguments[0])
                self._learnt.learn(operation, key, functools.partial(ask, session), send, recv, op)
                (begun,) = itertools.starmap(begin, ((*arguments, flight, request),))
        except Exception as error:
            if peer is None:
                session.refuse(error)
            raise
        if not begun:
            return None
        if peer is None:
            session.started = number
        else:
            session.messages = number
        # From here on the engine has the operation, even if a signal's handler raises an error.
        request.run = flight.run
        request.priority = flight.note[1].bit_length()
        self._engine.poll_soon()
        if peer is not None and flight.run is not None and flight.run.failure() is not None:
            self._engine.poll()
            request.raise_refusal()
        return request

    def sent(self, key: Key, ask: _Ask, array: Any, peer: int, tag: int, status: MPI.Status | None) -> bool:
        """Send or receive an array; False if it must take the usual way."""
        session = self._session
        codec = key[CODEC]
        if self.messages_waiting or (codec is not None and not _is_key(codec)):
            return False
        if trace.recorder is not None or session.on_start is not None:
            return False
        operation = self._operations.get(key)
        if operation is None or session.step != self._learnt.step:
            operation = self._learnt.find(key, session.step)
        checked = session.compressed_from is not None and key[0] == "recv"
        if checked and status is None:
            status = MPI.Status()
        at = 0 if status is None else MPI._addressof(status)
        try:
            (done,) = map(operation.message, (array,), (peer,), (tag,), (at,))
            if done is None:
                self._learnt.learn(operation, key, functools.partial(ask, session), array, array, None)
                (done,) = map(operation.message, (array,), (peer,), (tag,), (at,))
        except MPI.Exception as error:
            raise session.explained(error, peer) from None
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
            self.check_plain(array, status)
        return True

    def exchanged(
        self,
        keys: tuple[Key, Key],
        ask: _Ask,
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
        session = self._session
        sending, receiving = keys
        codec = sending[CODEC]
        if self.messages_waiting or (codec is not None and not _is_key(codec)):
            return False
        if trace.recorder is not None:
            return False
        sends, receives = self._operations.get(sending), self._operations.get(receiving)
        if sends is None or receives is None or session.step != self._learnt.step:
            sends, receives = (
                self._learnt.find(sending, session.step),
                self._learnt.find(receiving, session.step),
            )
        checked = session.compressed_from is not None
        if checked and status is None:
            status = MPI.Status()
        arguments = (sends, *outgoing, *incoming, 0 if status is None else MPI._addressof(status))
        (done,) = itertools.starmap(receives.exchange, (arguments,))
        if done is None:
            for operation, key, array in (sends, sending, outgoing[0]), (receives, receiving, incoming[0]):
                if not operation.knows(array, array):
                    self._learnt.learn(operation, key, functools.partial(ask, session), array, array, None)
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
            self.check_plain(incoming[0], status)
        return True

    def check_plain(self, buf: Any, status: MPI.Status | None) -> None:
        """Refuse compressed data: they are of a larger array, whose message happens to fit."""
        if status is not None and _is_float(buf) and encoded(status.Get_count(MPI.BYTE)):
            raise self._session.too_large(status.Get_source(), "it is compressed")

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
                raise self._session.explained(MPI.Exception(code), -1 if peer is None else peer)
        if tag is not None and not isinstance(first[0], int):
            requests[0] = posted_late(self._session, requests[0], first[1], first[2], tag, first[3])
        wait_for(requests, None)

    def _hand_over(self, left: list[_Left]) -> list[progress.Request]:
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
                    self._session.start_steps(
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
        session = self._session
        flight, keep, peer, status = left
        row, raw, plain, _ = flight.note
        run = flight.run
        if run is not None and row.op != "recv":
            if not run.done():
                yield from ended(run)
            if run.failure() is None:
                session.table.count(row, 1, raw, plain, time.perf_counter() - flight.began, run.tally())
                return
        call = Call(row.axis, row.op, row.codec, row.reason, raw, plain)
        call.starts(flight.began)
        if run is None:
            call.wire_bytes, call.between_bytes = plain, leaving(plain, session.away, peer)
            request = MPI.Request.fromhandle(flight.request)
            statuses = [MPI.Status() if status is None else status] if call.op == "recv" else None
            yield Pending([request], [-1 if peer is None else peer], statuses, sends=call.op == "send")
        elif call.op == "recv":
            out = parse(keep, writable=True)
            carrier = Carrier(session.message_transport, codec_of(call.codec), out.dtype, call)
            yield from received(run, out, MPI.Status() if status is None else status, carrier)
        else:
            transport = session.message_transport if call.op == "send" else session.transport
            yield from awaited(run, Coder(transport, codec_of(call.codec), DType.FLOAT32, call))
        session.table.add(call)


def _is_key(codec: Any) -> bool:
    """Tell whether a codec that a call asks for may be in the key of a cached operation: a choice may not."""
    return codec.__class__ is str or isinstance(codec, Codec)


def _is_float(buf: Any) -> bool:
    """Tell whether a buffer has floats, of which messages may be compressed."""
    datatype = datatype_of(buf)
    dtype = None if datatype is None else BY_HANDLE.get(datatype.handle)
    return dtype is not None and dtype.is_float
