"""Blocking operations that MPI does on plain arrays, without the engine's cost.

A small message takes a few microseconds, and so does starting an operation. Where the policy leaves an array as it is,
MPI's non-blocking operation is posted at once and looked at for a moment; what takes longer goes to the engine,
which gives up the core, and ends it in time. Nobody overtakes: where an operation waits in line to be posted, the
next one takes the usual way.
"""

from __future__ import annotations

import weakref
from collections import deque
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
_LOOKS = 400  # looks that do: some 300 us
_UNSETTLED = 1024  # operations that a kind may leave uncounted
_MOST_KINDS = 4096
_PLAIN = 0x0101  # NumPy's flags C_CONTIGUOUS and ALIGNED


class Kind:
    """What operations of the same kind have in common.

    Attributes:
        row: their statistics; None if they are not for MPI alone, or not on arrays that it takes as they are.
        raw, plain: bytes of one, as in :class:`~hybridcomp.collectives.stats.StatRow`.
        send, recv: elements of its buffers.
        keep: what the key names by its id.
        seconds: of each that is not in ``row`` yet; a deque, since several threads may send.
    """

    __slots__ = ("keep", "plain", "raw", "recv", "row", "seconds", "send")

    def __init__(self, row: StatRow | None, call: Call | None, send: int, recv: int, keep: Any) -> None:
        self.row = row
        self.raw, self.plain = (0, 0) if call is None else (call.raw_bytes, call.plain_bytes)
        self.send, self.recv, self.keep = send, recv, keep
        self.seconds: deque[float] = deque()


class Known(NamedTuple):
    """Arrays that were used before, and what for.

    Attributes:
        kind: of the operation.
        said: its other arguments, and the step.
        alive: references that forget it once an array is no more.
    """

    kind: Kind
    said: tuple[Any, ...]
    alive: list[weakref.ref[Any]]


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
        self._known: dict[tuple[str, int, int], Known] = {}
        # Operations that are compared in detail all take the usual way.
        self._collective_line = self._transport.turns if self._comparison is None else _Busy()
        self._message_line = self._p2p_transport.turns

    def stats(self) -> list[StatRow]:
        """Totals per operation and codec since the communicator was made, on this rank."""
        for kind in list(self._kinds.values()):
            self._settle(kind)
        return super().stats()

    def _learn(
        self, key: Hashable, ask: Callable[[], tuple[Call, int, int] | None], keep: Any = None
    ) -> Kind:
        """The kind of a key: ``ask`` says what an operation would be counted as, and the elements of its buffers."""
        if len(self._kinds) >= _MOST_KINDS:
            for kind in self._kinds.values():
                self._settle(kind)
            self._kinds.clear()
            self._known.clear()
        call, send, recv = ask() or (None, 0, 0)
        kind = Kind(None if call is None else self._table.row(call), call, send, recv, keep)
        self._kinds[key] = kind
        return kind

    def _remember(self, op: str, send: Any, recv: Any, kind: Kind, said: tuple[Any, ...]) -> None:
        """Know two plain arrays again, without looking at them.

        Nobody else gets their ids while they live; and an array that is given another shape or dtype in place is still
        taken by MPI for what it then is.
        """
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        key = (op, id(send), id(recv))

        known = self._known  # and not the communicator, which its arrays must not keep

        def forget(_: Any) -> None:
            known.pop(key, None)

        arrays = [array for array in (send, recv) if isinstance(array, np.ndarray)]
        self._known[key] = Known(kind, said, [weakref.ref(array, forget) for array in arrays])

    def _finish(
        self, kind: Kind, request: MPI.Request, peer: int | None = None, status: MPI.Status | None = None
    ) -> None:
        """Wait for a posted operation, with ``peer`` or with all ranks, and count it."""
        began = perf_counter()
        test = request.Test
        try:
            if test(status) or self._spin(test, status):
                seconds = kind.seconds
                seconds.append(perf_counter() - began)
                if peer is None:
                    self._started += 1
                if len(seconds) >= _UNSETTLED:
                    self._settle(kind)
                return
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            what = f"recv on axis {self.axis!r}, rank {self.rank} of {self.size}"
            raise MismatchError(
                f"{what}: rank {peer} sent more than this rank has room for ({error})"
            ) from None
        row = kind.row
        assert row is not None
        call = Call(row.axis, row.op, row.codec, row.reason, kind.raw, kind.plain)
        steps = _remaining(request, -1 if peer is None else peer, status)
        self._start(steps, call, exact=True, status=status, common=peer is None).wait()

    @staticmethod
    def _spin(test: Callable[[MPI.Status | None], bool], status: MPI.Status | None) -> bool:
        for _ in range(_SPINS):
            if test(status):
                return True
        for _ in range(_LOOKS):
            sched_yield()
            if test(status):
                return True
        return False

    def _settle(self, kind: Kind) -> None:
        """Count what a kind has not counted yet."""
        seconds, calls = 0.0, 0
        while kind.seconds:
            try:
                seconds += kind.seconds.popleft()
            except IndexError:  # another thread took the last one
                break
            calls += 1
        if calls and kind.row is not None:
            self._table.count(kind.row, calls, kind.raw, kind.plain, seconds)


def _remaining(request: MPI.Request, peer: int, status: MPI.Status | None) -> Steps:
    yield Pending([request], [peer], None if status is None else [status])


def is_plain(array: Any) -> bool:
    """Whether MPI takes an array as it is."""
    return type(array) is np.ndarray and array.flags.num & _PLAIN == _PLAIN


def are_plain(send: Any, recv: Any, kind: Kind) -> bool:
    """Whether MPI takes arrays as they are, which have the kind's sizes and no memory in common.

    A send buffer may be ``MPI.IN_PLACE``.
    """
    if kind.row is None or recv.size != kind.recv or not is_plain(recv):
        return False
    if send is MPI.IN_PLACE:
        return True
    return (
        is_plain(send)
        and send.size == kind.send
        and send.dtype == recv.dtype
        and not np.may_share_memory(send, recv)
    )
