"""Blocking operations that MPI does on plain arrays, without the engine's cost.

A small message takes a few microseconds, and so does starting an operation. Where the policy leaves an array as it is,
MPI's non-blocking operation is posted at once and looked at for a moment; what takes longer goes to the engine,
which gives up the core, and ends it in time. Nobody overtakes: where an operation waits in line to be posted, the
next one takes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from os import sched_yield
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.collectives.core import Core
from hybridcomp.collectives.engine import Pending, Steps
from hybridcomp.collectives.stats import Call, StatRow
from hybridcomp.collectives.turns import Turns
from hybridcomp.errors import MismatchError

_SPINS = 12  # looks that do not give way
_LOOKS = 400  # looks in all: some 300 us
_MOST_KINDS = 4096
_PLAIN = 0x0101  # NumPy's flags C_CONTIGUOUS and ALIGNED


class Kind(NamedTuple):
    """What operations of the same kind have in common.

    Attributes:
        row: their statistics; None if they are not for MPI alone, or not on arrays that it takes as they are.
        raw, plain: bytes of one, as in :class:`~hybridcomp.collectives.stats.StatRow`.
        send, recv: elements of its buffers.
        keep: what the key names by its id.
    """

    row: StatRow | None
    raw: int = 0
    plain: int = 0
    send: int = 0
    recv: int = 0
    keep: Any = None


class _Busy(Turns):
    """A line that is never empty."""

    @property
    def empty(self) -> bool:
        """See :class:`Turns`."""
        return False


class Quick(Core):
    """A communicator that has kinds of plain operations."""

    def __init__(self, comm: MPI.Comm, policy: Any, axis: str, timeout: float) -> None:
        super().__init__(comm, policy, axis, timeout)
        self._kinds: dict[Hashable, Kind] = {}
        # Operations that are compared in detail all take the usual way.
        self._collective_line = self._transport.turns if self._comparison is None else _Busy()
        self._message_line = self._p2p_transport.turns

    def _learn(
        self, key: Hashable, ask: Callable[[], tuple[Call, int, int] | None], keep: Any = None
    ) -> Kind:
        """The kind of a key: ``ask`` says what an operation would be counted as, and the elements of its buffers."""
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        found = ask()
        if found is None:
            kind = Kind(None, keep=keep)
        else:
            call, send, recv = found
            kind = Kind(self._table.row(call), call.raw_bytes, call.plain_bytes, send, recv, keep)
        self._kinds[key] = kind
        return kind

    def _finish(
        self, kind: Kind, request: MPI.Request, peer: int | None = None, status: MPI.Status | None = None
    ) -> None:
        """Wait for a posted operation, with ``peer`` or with all ranks, and count it."""
        began = perf_counter()
        row = kind.row
        assert row is not None
        test = request.Test
        try:
            for look in range(_LOOKS):
                if test(status):
                    self._table.count(row, kind.raw, kind.plain, perf_counter() - began)
                    if peer is None:
                        self._started += 1
                    return
                if look >= _SPINS:
                    sched_yield()
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            what = f"{row.op} on axis {self.axis!r}, rank {self.rank} of {self.size}"
            raise MismatchError(
                f"{what}: rank {peer} sent more than this rank has room for ({error})"
            ) from None
        call = Call(row.axis, row.op, row.codec, row.reason, kind.raw, kind.plain)
        steps = _remaining(request, -1 if peer is None else peer, status)
        self._start(steps, call, exact=True, status=status, common=peer is None).wait()


def _remaining(request: MPI.Request, peer: int, status: MPI.Status | None) -> Steps:
    yield Pending([request], [peer], None if status is None else [status])


def is_plain(array: Any) -> bool:
    """Whether MPI takes an array as it is."""
    return type(array) is np.ndarray and array.flags.num & _PLAIN == _PLAIN


def are_plain(send: Any, recv: Any, kind: Kind) -> bool:
    """Whether MPI takes arrays as they are, which have the kind's sizes and no memory in common.

    A send buffer may be ``MPI.IN_PLACE``.
    """
    if recv.size != kind.recv or recv.flags.num & _PLAIN != _PLAIN:
        return False
    if type(send) is not np.ndarray:
        return send is MPI.IN_PLACE
    return (
        send.size == kind.send
        and send.dtype == recv.dtype
        and send.flags.num & _PLAIN == _PLAIN
        and (
            (send.base is None and recv.base is None and send is not recv)
            or not np.may_share_memory(send, recv)
        )
    )
