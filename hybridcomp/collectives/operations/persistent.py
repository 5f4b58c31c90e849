"""Start operations again and again on their own arrays: nothing is parsed or chosen at a start.

The functions are methods of a communicator. A plan's codec is chosen when it is made, at the ``step`` of that time.
Making a plan is collective. Keyword arguments are those of the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import DType, DTypeLike, Flat, as_dtype
from hybridcomp.collectives.buffers import datatype, raw, typed
from hybridcomp.collectives.choices import CodecLike, OperationOptions
from hybridcomp.collectives.execution import progress
from hybridcomp.collectives.execution.mpi_collectives import native, reduces_directly
from hybridcomp.collectives.execution.mpi_ops import same_on_all
from hybridcomp.collectives.operations import flat_gather_scatter, flat_reductions
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.session import HasSession, Op, Session
from hybridcomp.collectives.starting import Operands
from hybridcomp.collectives.stats import Call, allreduce_bytes
from hybridcomp.policy import Choice

Shape = int | tuple[int, ...]
Array = np.ndarray[Any, Any]


class Plan:
    """Persistent operation and its buffers; a context manager that frees it.

    Attributes:
        send: array to fill before a start; its contents stay.
        recv: array of the result; ``send`` itself for a broadcast.
    """

    def __init__(
        self, send: Array, recv: Array, begin: Callable[[], progress.Request], release: Callable[[], None]
    ):
        self.send = send
        self.recv = recv
        self._begin = begin
        self._release = release
        self._running: progress.Request | None = None
        self._freed = False

    def start(self) -> Request:
        """Start the operation; both arrays belong to it until the request is done.

        Raises:
            RuntimeError: the operation is still running, or the plan was freed.
        """
        return Request(self._start())

    def run(self) -> Array:
        """Start the operation and wait for it; return ``recv``."""
        self._start().wait()
        return self.recv

    def free(self) -> None:
        """Release MPI's request; collective, and not while the operation is running."""
        self._idle()
        if not self._freed:
            self._freed = True
            self._release()

    def _start(self) -> progress.Request:
        self._idle()
        if self._freed:
            raise RuntimeError("the plan has been freed")
        self._running = self._begin()
        return self._running

    def _idle(self) -> None:
        if self._running is not None and not self._running.done:
            raise RuntimeError(f"{self._running.what} of this plan is still running")

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.free()


def plan_allreduce(
    comm: HasSession,
    shape: Shape,
    dtype: DTypeLike,
    op: Op = MPI.SUM,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Plan:
    """Plan an all-reduce of arrays of a shape."""
    session = comm.session
    send, recv, s, r = _arrays(dtype, shape, shape)
    choice = flat_reductions.choose_sum(session, "all_reduce", r, op, OperationOptions(name, phase, codec))
    if (
        isinstance(op, MPI.Op)
        and not flat_reductions.uses_schedule(choice, r, op)
        and reduces_directly(r.dtype, 1)
    ):
        own = same_on_all(op, datatype(r.dtype), sums=True)
        post = session.mpi.Allreduce_init(typed(s.data, s.dtype), typed(r.data, r.dtype), own)
        sent = allreduce_bytes(r.nbytes, session.size)
        return _persistent(session, "all_reduce", choice, post, send, recv, r.nbytes, sent)
    return _plan(
        send,
        recv,
        lambda: flat_reductions.allreduce(session, s, r, op, OperationOptions(name, phase, choice)),
    )


def plan_reduce_scatter_block(
    comm: HasSession,
    shape: Shape,
    dtype: DTypeLike,
    op: Op = MPI.SUM,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Plan:
    """Plan a reduce-scatter whose blocks have a shape: ``send`` has one more dim, the ranks."""
    session = comm.session
    send, recv, s, r = _arrays(dtype, _all_of(session, shape), shape)
    choice = flat_reductions.choose_sum(
        session, "reduce_scatter", s, op, OperationOptions(name, phase, codec)
    )
    plain = (
        not choice.codec.linear
        and not flat_reductions.uses_schedule(choice, s, op)
        and reduces_directly(s.dtype, 1)
    )
    if isinstance(op, MPI.Op) and plain:
        own = same_on_all(op, datatype(s.dtype))
        post = session.mpi.Reduce_scatter_block_init(typed(s.data, s.dtype), typed(r.data, r.dtype), own)
        return _persistent(
            session, "reduce_scatter", choice, post, send, recv, s.nbytes, (session.size - 1) * r.nbytes
        )
    return _plan(
        send,
        recv,
        lambda: flat_reductions.reduce_scatter_block(
            session, s, r, op, OperationOptions(name, phase, choice)
        ),
    )


def plan_allgather(
    comm: HasSession,
    shape: Shape,
    dtype: DTypeLike,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Plan:
    """Plan an all-gather of arrays of a shape: ``recv`` has one more dim, the ranks."""
    session = comm.session
    send, recv, s, r = _arrays(dtype, shape, _all_of(session, shape))
    choice = session.choose("all_gather", s, OperationOptions(name, phase, codec))
    if not choice.compresses:
        post = session.mpi.Allgather_init(raw(s), raw(r))
        return _persistent(
            session, "all_gather", choice, post, send, recv, r.nbytes, (session.size - 1) * s.nbytes
        )
    return _plan(
        send,
        recv,
        lambda: flat_gather_scatter.allgather(session, s, r, OperationOptions(name, phase, choice)),
    )


def plan_bcast(
    comm: HasSession,
    shape: Shape,
    dtype: DTypeLike,
    root: int = 0,
    *,
    name: str | None = None,
    phase: str | None = None,
    codec: CodecLike = None,
) -> Plan:
    """Plan a broadcast of one array of a shape, ``send`` and ``recv`` alike, from ``root``."""
    session = comm.session
    session.check_rank(root, "root")
    send, _, s, _ = _arrays(dtype, shape, 0)
    choice = session.choose("broadcast", s, OperationOptions(name, phase, codec))
    if not choice.compresses:
        post = session.mpi.Bcast_init(raw(s), root)
        return _persistent(session, "broadcast", choice, post, send, send, s.nbytes, 0)
    return _plan(
        send, send, lambda: flat_gather_scatter.bcast(session, s, root, OperationOptions(name, phase, choice))
    )


def _all_of(session: Session, shape: Shape) -> tuple[int, ...]:
    return (session.size, *((shape,) if isinstance(shape, int) else shape))


def _persistent(
    session: Session,
    op: str,
    choice: Choice,
    request: MPI.Prequest,
    send: Array,
    recv: Array,
    nbytes: int,
    sent: int,
) -> Plan:
    """Return a plan of one of MPI's persistent requests."""

    def post() -> MPI.Prequest:
        request.Start()
        return request

    def begin() -> progress.Request:
        call: Call = session.new_call(op, choice, nbytes, sent, count=send.size, dtype=send.dtype)
        return session.start_native(
            lambda _s, _r, ticket, events: native(post, ticket, events), call, Operands()
        )

    return Plan(send, recv, begin, request.Free)


def _plan(send: Array, recv: Array, begin: Callable[[], progress.Request]) -> Plan:
    return Plan(send, recv, begin, lambda: None)


def _arrays(dtype: DTypeLike, send: Shape, recv: Shape) -> tuple[Array, Array, Flat, Flat]:
    """Return two new arrays of zeros, and their flat views; bfloat16 is stored as its bits, in uint16."""
    kind: DType = as_dtype(dtype)
    arrays = [np.zeros(shape, kind.storage) for shape in (send, recv)]
    flats = [Flat(a.reshape(-1), kind, a.shape, True, False) for a in arrays]
    return arrays[0], arrays[1], flats[0], flats[1]
