"""Pass operations that no policy compresses to MPI, with the buffers as the caller gives them.

Whether an operation is compressed follows from what MPI has alike on all ranks: operation, type signature, count,
policy, axis. Where that says that it is not, mpi4py reads the buffers, and MPI does the operation: a call costs what it
costs in bare mpi4py and a few microseconds. A blocking call polls it for a moment; one that takes longer becomes a
request of the engine, which gives up the core, and ends it in time. A non-blocking call returns MPI's own request
(:class:`~hybridcomp.collectives.requests.Request`).
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, TypeVar, cast

import numpy as np
from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.arrays import DType, is_torch
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.fast_path_cache import library
from hybridcomp.collectives.operations.fast_path import FastPath
from hybridcomp.collectives.operations.probes import AsBytes, posted_late
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.session import HasSession, Session
from hybridcomp.collectives.stats import Call, leaving
from hybridcomp.native import kernels
from hybridcomp.perfmodel.model import BULK_BYTES
from hybridcomp.pmi.library import address
from hybridcomp.policy import Message, Policy

# The policy's word for each of MPI's operations that may be passed on. An all-reduce of several ranks is not: the
# engine runs those of floats, compressed or not. Nor is a reduce-scatter of unlike parts: it becomes one of like parts.
_NAMES = ("send", "broadcast", "gather", "scatter", "all_gather", "all_to_all", "reduce", "reduce_scatter")
_new: Callable[..., Request] = MPI.Request.__new__
# An operation that is MPI's alone: its name, MPI's non-blocking function and the arguments of that, the bytes of this
# rank's values, and how many times this rank sends them.
ByMpi = tuple[str, Callable[..., MPI.Request], tuple[Any, ...], int, float]
_NEVER = 1 << 62  # bytes: more than any message
# Bytes from which the engine makes a non-blocking collective progress while the caller computes.
_BRIEF = 1 << 14
_Method = TypeVar("_Method", bound=Callable[..., Any])
_all: weakref.WeakSet[PassThrough] = weakref.WeakSet()


def _forked() -> None:
    """Leave all operations to the engine, whose error says that MPI belongs to the parent process."""
    for one in _all:
        one.close()


os.register_at_fork(after_in_child=_forked)


class Operates(HasSession, Protocol):
    """Communicator as the functions of operations know it."""

    @property
    def fast_path(self) -> FastPath:
        """Return the native path of operations on plain arrays."""

    @property
    def pass_through(self) -> PassThrough:
        """Return the way of operations that no policy compresses."""


def told(method: _Method) -> _Method:
    """Tell the other ranks of an error in a collective that comes before anything has begun here."""

    @functools.wraps(method)
    def start(comm: HasSession, *arguments: Any, **options: Any) -> Any:
        session = comm.session
        before = session.started
        try:
            return method(comm, *arguments, **options)
        except Exception as error:
            if session.started == before:
                session.refuse(error)
            raise

    return cast("_Method", start)


class PassThrough:
    """Way of a communicator's operations to MPI, where its policy compresses none of their kind, or of their size.

    Attributes:
        session: the communicator's session.
        fast_path: its fast path, of whose operations none is overtaken.
        sends, receives: starts of messages that are MPI's alone, in compiled code; None where they are closed.
        survey: function of compiled code that returns the bytes of two buffers: see :meth:`passes`.
    """

    def __init__(self, session: Session, fast_path: FastPath) -> None:
        """Open the way, and follow the session's policy from now on."""
        self.session = session
        self.fast_path = fast_path
        self.sends: Any = None
        self.receives: Any = None
        self.survey = library().survey
        self._settle = library().settle
        self._inside = inside_mpi()
        self._reconsider()
        session.listen(self._reconsider)
        _all.add(self)

    def _reconsider(self) -> None:
        """Read policy, axis and timeout again."""
        session = self.session
        self.fast_path.reconsider()
        below = {name: _exact_below(session.policy, session.axis, name) for name in _NAMES}
        if session.programs is not None and session.topology.tiered:
            least = -(-BULK_BYTES // session.size)  # from there on it is the engine's, in two levels
            below["all_gather"] = min(below["all_gather"], least)
        if session.comparison is not None:  # which compares counts and types
            below = dict.fromkeys(_NAMES, 0)
        below |= {"recv": below["send"], "scan": _NEVER, "exscan": _NEVER}
        if session.size == 1 and session.comparison is None:
            below = dict.fromkeys([*below, "all_reduce"], _NEVER)
        self._passed_below = below
        self._totals: dict[str, list[Any]] = {}
        self.sends = self._messages_of("send", "Isend", self.fast_path.met)
        exact = session.compressed_from is None
        self.receives = self._messages_of("recv", "Irecv", None) if exact else None

    def close(self) -> None:
        """Leave all operations to the engine."""
        self.fast_path.close()
        self.sends = self.receives = None

    def _messages_of(self, op: str, name: str, met: Any) -> Any:
        """Return the start in compiled code of messages that are MPI's alone, which counts them."""
        session, below = self.session, self._passed_below[op]
        messages = kernels().MpiMessages(
            library(),
            address(f"MPI_{name}"),
            session.p2p.handle,
            op == "send",
            getattr(session.p2p, name),
            Request,
            op,
            self.fast_path.messages_waiting,
            met,
            trace.__dict__,
            -1 if below == _NEVER else below,
            session.away,
        )
        session.learnt.watch(messages, session.axis, op, self._reason(op), sends=op == "send")
        return messages

    def passes(
        self, op: str, codec: CodecLike, data: Any, other: Any = None, times: int = 1, blocks: int = 1
    ) -> int:
        """Tell whether an operation is MPI's alone, whatever the other ranks' buffers look like.

        Args:
            op: operation.
            codec: codec that the call asks for.
            data: buffer whose size decides, with those of the same size on the other ranks.
            other: another buffer.
            times: number of buffers such as ``data`` that the policy is asked about; 0 where ranks know no common
                size.
            blocks: number of blocks in ``data``, of which the policy is asked about one.

        Returns:
            The bytes of ``data``, 0 where they are not known; a negative number if the operation is not MPI's alone.
        """
        if codec is not None:
            return -1
        nbytes: int = self.survey(data, other)
        if nbytes < -1:
            moves = self.is_mpis(op) and not op.startswith("reduce")
            return 0 if moves and _read_by_mpi4py(data, other, self.survey) else nbytes
        each = nbytes if blocks == 1 or _counted(data) else nbytes // blocks
        below = self._passed_below.get(op, 0)
        if below != _NEVER and (not times or nbytes < 0 or each * times >= below):
            return -1
        return max(0, each * blocks)

    def is_mpis(self, op: str, codec: CodecLike = None) -> bool:
        """Tell whether operations of a kind are MPI's alone, of any size."""
        return codec is None and self._passed_below.get(op, 0) == _NEVER

    def run(
        self,
        op: str,
        post: Callable[..., MPI.Request],
        arguments: tuple[Any, ...],
        nbytes: int = 0,
        copies: float = 1,
        peer: int | None = None,
        status: MPI.Status | None = None,
    ) -> None:
        """Run one of MPI's own operations.

        Args:
            op: operation.
            post: MPI's non-blocking function.
            arguments: arguments of it.
            nbytes: bytes of this rank's values.
            copies: number of times that this rank sends them.
            peer: peer of a send or a receive; None for a collective.
            status: status of a receive, to fill.
        """
        session = self.session
        began = time.perf_counter()
        if not self._may_post(peer, op):
            return self._pass_later(op, post, arguments, nbytes, peer, status, copies).wait()
        try:
            with self._inside:
                # Python calls a signal's handler at the end of a call, whose result would be lost: this is no call.
                (request,) = itertools.starmap(post, (arguments,))
        except Exception as error:
            if peer is None:
                session.refuse(error)
            raise
        try:
            at = 0 if status is None else MPI._addressof(status)
            (done,) = map(self._settle, (MPI._addressof(request),), (at,))
        except MPI.Exception as error:
            raise session.explained(error, peer) from None
        except BaseException:  # a signal's handler raised it: the engine goes on with the operation
            if request != MPI.REQUEST_NULL:
                self._pass_later(op, lambda *_: request, arguments, nbytes, peer, status, copies)
            raise
        if not done:
            return self._pass_later(op, lambda *_: request, arguments, nbytes, peer, status, copies).wait()
        self._count_passed(op, nbytes, peer, copies, time.perf_counter() - began)
        return None

    def begin(
        self,
        op: str,
        post: Callable[..., MPI.Request],
        arguments: tuple[Any, ...],
        nbytes: int = 0,
        copies: float = 1,
        peer: int | None = None,
    ) -> Request:
        """Start one of MPI's own operations; the arguments are those of :meth:`run`."""
        session = self.session
        if session.on_start is not None or not self._may_post(peer, op):
            return Request(self._pass_later(op, post, arguments, nbytes, peer, None, copies))
        try:
            with self._inside:
                (request,) = map(_new, (Request,), itertools.starmap(post, (arguments,)))
        except Exception as error:
            if peer is None:
                session.refuse(error)
            raise
        self._count_passed(op, nbytes, peer, copies, 0.0)
        number = session.started if peer is None else session.messages
        request.begun = (session, op, peer, number, time.perf_counter())
        return request

    def initialised(self, op: str, make: Callable[[], MPI.Prequest] | None) -> MPI.Prequest | None:
        """Make a persistent request of MPI's, or none, in a collective call that has a number as others have.

        It raises the error of another rank, whose arguments are wrong, or the next collective does.
        """
        session = self.session
        queue = session.transport.post_queue
        session.await_refusals(op)
        # Where MPI refuses wrong arguments, this raises, and nothing has begun.
        made = make() if make is not None and queue.empty else None

        def steps() -> Steps:
            nonlocal made
            if make is not None and made is None:
                with queue.take().held() as ticket:
                    made = cast("MPI.Prequest", (yield from ticket.post(make)))
            yield from ()

        try:
            session.start_steps(steps(), session.new_plain_call(op, 0, 0), counted=False).wait()
        except BaseException:
            if made is not None:
                made.Free()
            raise
        return made

    def _may_post(self, peer: int | None, op: str) -> bool:
        """Tell whether MPI may have an operation at once, and nobody needs to know of it."""
        session, path = self.session, self.fast_path
        if trace.recorder is not None:
            return False
        if peer is not None:
            return not path.messages_waiting and (op == "recv" or peer in path.met or peer < 0)
        notices = session.notices
        return not (
            path.waiting
            or session.started >= session.review_at
            or (notices is not None and (notices.troubled or notices.belated))
        )

    def _pass_later(
        self,
        op: str,
        post: Callable[..., MPI.Request],
        arguments: tuple[Any, ...],
        nbytes: int,
        peer: int | None,
        status: MPI.Status | None,
        copies: float,
    ) -> progress.Request:
        """Start one of MPI's own operations as a request of the engine."""
        session = self.session
        about = {} if peer is None else {"peer": peer}
        counted = Call(session.axis, op, "none", self._reason(op), nbytes, int(nbytes * copies), about)

        def begin() -> MPI.Request:
            return post(*arguments)

        if peer is None:
            return self._begin_collective(op, begin, counted)
        t = session.message_transport
        if op == "recv":
            given = MPI.Status() if status is None else status
            request = session.start_foreign(op, begin, transport=t, peer=peer, status=given, call=counted)
            if not isinstance(arguments[0], AsBytes):
                return request
            return posted_late(session, request, arguments[0].given, peer, arguments[2], status)
        return session.start_foreign(op, lambda: t.start(peer, begin), transport=t, peer=peer, call=counted)

    @told
    def _begin_collective(self, op: str, begin: Callable[[], MPI.Request], call: Call) -> progress.Request:
        return self.session.start_foreign(op, begin, call=call)

    def _count_passed(self, op: str, nbytes: int, peer: int | None, copies: float, seconds: float) -> None:
        """Count an operation in statistics, once it has begun or ended."""
        session = self.session
        if peer is None:
            session.started += 1
            notices = session.notices
            if notices is not None:
                notices.latest = session.started
        else:
            session.messages += 1
        totals = self._totals.get(op)
        if totals is None:
            totals = self._totals[op] = session.learnt.passed(session.axis, op, self._reason(op))
        totals[0] += 1
        totals[1] += nbytes
        totals[2] += int(nbytes * copies)
        totals[3] += seconds
        totals[4] += leaving(int(nbytes * copies), session.away, peer)

    def _reason(self, op: str) -> str:
        """Return the reason why operations of a kind are passed to MPI, for statistics."""
        session = self.session
        if op == "recv":
            return "as sent"
        if op in ("scan", "exscan", "barrier"):
            return "never compressed"
        if session.size == 1:
            return "one rank"
        message = Message(session.axis, op, None, DType.FLOAT32, 0, None, None, (0,), hosts=session.hosts)
        return session.policy.choose(message).reason


def _exact_below(policy: Policy, axis: str, op: str) -> int:
    """Return the size in bytes below which a policy compresses no operation of a kind."""
    least = policy.least_bytes(axis, op)
    return _NEVER if least is None else least


def _read_by_mpi4py(data: Any, other: Any, survey: Callable[[Any, Any], int]) -> bool:
    """Tell whether two buffers are MPI's only as something else because one is another library's, by DLPack."""
    found = False
    for spec in data, other:
        owner = spec[0] if isinstance(spec, list | tuple) and spec else spec
        dlpack = hasattr(owner, "__dlpack__") and not (
            is_torch(owner) or isinstance(owner, np.ndarray) or hasattr(owner, "__cuda_array_interface__")
        )
        if not dlpack and survey(spec, None) < -1:
            return False
        found |= dlpack
    return found  # else their memory overlaps


def _counted(spec: Any) -> bool:
    """Tell whether a buffer has a count, which is that of one block."""
    return isinstance(spec, list | tuple) and len(spec) > 2 and spec[1] is not None


def brief(by_mpi: ByMpi | None) -> TypeGuard[ByMpi]:
    """Tell whether MPI alone does an operation, and nobody need make it progress before the caller waits for it."""
    return by_mpi is not None and by_mpi[3] < _BRIEF
