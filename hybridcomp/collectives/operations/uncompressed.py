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
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from mpi4py import MPI

from hybridcomp import trace
from hybridcomp.arrays import DType, Flat, is_torch
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.operations.fast_path import FastPath
from hybridcomp.collectives.operations.fast_path_cache import library
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.stats import Call, leaving
from hybridcomp.native import kernels
from hybridcomp.perfmodel.model import BULK_BYTES
from hybridcomp.pmi.library import address
from hybridcomp.policy import Message, Policy

# The policy's word for each of MPI's operations that may be passed on. An all-reduce of several ranks is not: all run
# it by the compiled engine, compressed or not. Nor is a reduce-scatter of unlike parts: it becomes one of like parts.
_NAMES = ("send", "broadcast", "gather", "scatter", "all_gather", "all_to_all", "reduce", "reduce_scatter")
_new: Callable[..., Request] = MPI.Request.__new__
_NEVER = 1 << 62  # bytes: more than any message
# Bytes from which the engine makes a non-blocking collective progress while the caller computes.
_BRIEF = 1 << 14
_Method = TypeVar("_Method", bound=Callable[..., Any])


def told(method: _Method) -> _Method:
    """Tell the other ranks of an error in a collective that comes before anything has begun here."""

    @functools.wraps(method)
    def start(self: Uncompressed, *arguments: Any, **options: Any) -> Any:
        before = self._started
        try:
            return method(self, *arguments, **options)
        except Exception as error:
            if self._started == before:
                self._refuse(error)
            raise

    return cast("_Method", start)


def stored(request: engine.Request, *flats: Flat | None) -> engine.Request:
    """Write packed results to the caller's memory once an operation has ended well; return its request."""

    def write(_: Any) -> None:
        if request.exception is not None:
            return
        for flat in flats:
            if flat is None or flat.store is None:
                continue
            n, status = flat.size, request.status
            if status is not None:
                n = max(0, status.Get_elements(MPI.BYTE)) // flat.dtype.itemsize
            flat.store(flat.data[:n])

    if any(flat is not None and flat.store is not None for flat in flats):
        request.add_done_callback(write)
    return request


class Uncompressed(FastPath):
    """Communicator that passes operations to MPI where its policy compresses none of their kind, or of their size."""

    _passed_below: dict[str, int]

    def _reconsider(self) -> None:
        super()._reconsider()
        self._passed_below = {name: _exact_below(self.policy, self.axis, name) for name in _NAMES}
        if self._programs is not None and self._topology.tiered:
            least = -(-BULK_BYTES // self.size)  # from there on it is the engine's, in two levels
            self._passed_below["all_gather"] = min(self._passed_below["all_gather"], least)
        if self._comparison is not None:  # which compares counts and types
            self._passed_below = dict.fromkeys(_NAMES, 0)
        self._passed_below |= {"recv": self._passed_below["send"], "scan": _NEVER, "exscan": _NEVER}
        if self.size == 1 and self._comparison is None:
            self._passed_below = dict.fromkeys([*self._passed_below, "all_reduce"], _NEVER)
        self._totals: dict[str, list[Any]] = {}
        self._sends = self._messages_of("send", "Isend", self._met)
        self._receives = (
            None if self._compressed_from is not None else self._messages_of("recv", "Irecv", None)
        )
        self._survey = library().survey
        self._settle = library().settle
        self._inside = inside_mpi()

    def _messages_of(self, op: str, name: str, met: Any) -> Any:
        """Return the start in compiled code of messages that are MPI's alone, which counts them."""
        below = self._passed_below[op]
        messages = kernels().MpiMessages(
            library(),
            address(f"MPI_{name}"),
            self._p2p.handle,
            op == "send",
            getattr(self._p2p, name),
            Request,
            op,
            self._messages_waiting,
            met,
            trace.__dict__,
            -1 if below == _NEVER else below,
            self._away,
        )
        self._learnt.watch(messages, self._axis, op, self._reason(op), sends=op == "send")
        return messages

    def _passes(
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
        nbytes: int = self._survey(data, other)
        if nbytes < -1:
            moves = self._is_mpis(op) and not op.startswith("reduce")
            return 0 if moves and _read_by_mpi4py(data, other, self._survey) else nbytes
        each = nbytes if blocks == 1 or _counted(data) else nbytes // blocks
        below = self._passed_below.get(op, 0)
        if below != _NEVER and (not times or nbytes < 0 or each * times >= below):
            return -1
        return max(0, each * blocks)

    def _is_mpis(self, op: str, codec: CodecLike = None) -> bool:
        """Tell whether operations of a kind are MPI's alone, of any size."""
        return codec is None and self._passed_below.get(op, 0) == _NEVER

    def _run_by_mpi(
        self,
        op: str,
        post: Callable[..., MPI.Request],
        arguments: tuple[Any, ...],
        nbytes: int = 0,
        peer: int | None = None,
        status: MPI.Status | None = None,
        copies: float = 1,
    ) -> None:
        """Run one of MPI's own operations.

        Args:
            op: operation.
            post: MPI's non-blocking function.
            arguments: arguments of it.
            nbytes: bytes of this rank's values.
            peer: peer of a send or a receive; None for a collective.
            status: status of a receive, to fill.
            copies: number of times that this rank sends them.
        """
        began = time.perf_counter()
        if not self._may_post(peer, op):
            return self._pass_later(op, post, arguments, nbytes, peer, status, copies).wait()
        try:
            with self._inside:
                # Python calls a signal's handler at the end of a call, whose result would be lost: this is no call.
                (request,) = itertools.starmap(post, (arguments,))
        except Exception as error:
            if peer is None:
                self._refuse(error)
            raise
        try:
            at = 0 if status is None else MPI._addressof(status)
            (done,) = map(self._settle, (MPI._addressof(request),), (at,))
        except MPI.Exception as error:
            raise self.explained(error, peer) from None
        except BaseException:  # a signal's handler raised it: the engine goes on with the operation
            if request != MPI.REQUEST_NULL:
                self._pass_later(op, lambda *_: request, arguments, nbytes, peer, status, copies)
            raise
        if not done:
            return self._pass_later(op, lambda *_: request, arguments, nbytes, peer, status, copies).wait()
        self._count_passed(op, nbytes, peer, copies, time.perf_counter() - began)
        return None

    def _begin_by_mpi(
        self,
        op: str,
        post: Callable[..., MPI.Request],
        arguments: tuple[Any, ...],
        nbytes: int = 0,
        peer: int | None = None,
        copies: float = 1,
    ) -> Request:
        """Start one of MPI's own operations; the arguments are those of :meth:`_run_by_mpi`."""
        if self.on_start is not None or not self._may_post(peer, op):
            return Request(self._pass_later(op, post, arguments, nbytes, peer, None, copies))
        try:
            with self._inside:
                (request,) = map(_new, (Request,), itertools.starmap(post, (arguments,)))
        except Exception as error:
            if peer is None:
                self._refuse(error)
            raise
        self._count_passed(op, nbytes, peer, copies, 0.0)
        number = self._started if peer is None else self._messages
        request.begun = (self, op, peer, number, time.perf_counter())
        return request

    def take_over(
        self, request: MPI.Request, op: str, peer: int | None, number: int, status: MPI.Status | None
    ) -> engine.Request:
        """Have the engine go on with an operation that MPI has: see :class:`~hybridcomp.collectives.requests.Begun`."""
        if peer is not None and not number:
            self._messages = number = self._messages + 1
        peers = [-1 if peer is None else peer]
        sends = peer is not None and op != "recv"

        def steps() -> Steps:
            yield Pending([request], peers, None if status is None else [status], sends=sends)

        return engine.engine().start(
            steps(),
            (op, number, self._axis, self.rank, self.size),
            self._timeout,
            status,
            notices=self._notices if peer is None and not self._freed else None,
            number=number,
            communicator=self.key,
        )

    def waited(self, request: MPI.Request, status: MPI.Status | None, peer: int | None) -> bool:
        """Poll an operation that MPI has for a moment; return whether it has ended."""
        try:
            at = 0 if status is None else MPI._addressof(status)
            done = self._settle(MPI._addressof(request), at)
            return bool(done)
        except MPI.Exception as error:
            raise self.explained(error, peer) from None

    def explained(self, error: MPI.Exception, peer: int | None) -> Exception:
        """Return the error to raise for one of MPI's: a message that is too long is a mismatch."""
        return error if peer is None else self._explained(error, peer)

    def _initialised(self, op: str, make: Callable[[], MPI.Prequest] | None) -> MPI.Prequest | None:
        """Make a persistent request of MPI's, or none, in a collective call that has a number as others have.

        It raises the error of another rank, whose arguments are wrong, or the next collective does.
        """
        queue = self.transport.post_queue
        self._await_refusals(op)
        # Where MPI refuses wrong arguments, this raises, and nothing has begun.
        made = make() if make is not None and queue.empty else None

        def steps() -> Steps:
            nonlocal made
            if make is not None and made is None:
                with queue.take().held() as ticket:
                    made = cast("MPI.Prequest", (yield from ticket.post(make)))
            yield from ()

        try:
            self.start_steps(steps(), self.new_plain_call(op, 0, 0), counted=False).wait()
        except BaseException:
            if made is not None:
                made.Free()
            raise
        return made

    def _may_post(self, peer: int | None, op: str) -> bool:
        """Tell whether MPI may have an operation at once, and nobody needs to know of it."""
        if trace.recorder is not None:
            return False
        if peer is not None:
            return not self._messages_waiting and (op == "recv" or peer in self._met or peer < 0)
        notices = self._notices
        return not (
            self._waiting
            or self._started >= self._review_at
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
    ) -> engine.Request:
        """Start one of MPI's own operations as a request of the engine."""
        about = {} if peer is None else {"peer": peer}
        counted = Call(self.axis, op, "none", self._reason(op), nbytes, int(nbytes * copies), about)

        def begin() -> MPI.Request:
            return post(*arguments)

        if peer is None:
            return self._begin_collective(op, begin, counted)
        t = self.message_transport
        if op == "recv":
            given = MPI.Status() if status is None else status
            return self._foreign(op, begin, transport=t, peer=peer, status=given, call=counted)
        return self._foreign(op, lambda: t.start(peer, begin), transport=t, peer=peer, call=counted)

    @told
    def _begin_collective(self, op: str, begin: Callable[[], MPI.Request], call: Call) -> engine.Request:
        return self._foreign(op, begin, call=call)

    def _count_passed(self, op: str, nbytes: int, peer: int | None, copies: float, seconds: float) -> None:
        """Count an operation in statistics, once it has begun or ended."""
        if peer is None:
            self._started += 1
            notices = self._notices
            if notices is not None:
                notices.latest = self._started
        else:
            self._messages += 1
        totals = self._totals.get(op)
        if totals is None:
            totals = self._totals[op] = self._learnt.passed(self._axis, op, self._reason(op))
        totals[0] += 1
        totals[1] += nbytes
        totals[2] += int(nbytes * copies)
        totals[3] += seconds
        totals[4] += leaving(int(nbytes * copies), self._away, peer)

    def _reason(self, op: str) -> str:
        """Return the reason why operations of a kind are passed to MPI, for statistics."""
        if op == "recv":
            return "as sent"
        if op in ("scan", "exscan", "barrier"):
            return "never compressed"
        if self.size == 1:
            return "one rank"
        message = Message(self.axis, op, None, DType.FLOAT32, 0, None, None, (0,), hosts=self.hosts)
        return self.policy.choose(message).reason


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


def brief(nbytes: int) -> bool:
    """Tell whether an operation needs nobody to make it progress before the caller waits for it."""
    return 0 <= nbytes < _BRIEF
