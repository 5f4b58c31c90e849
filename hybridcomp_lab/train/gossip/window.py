"""Put records into neighbours' memory by MPI's one-sided operations, so that no torn record is ever taken for one.

A window has room for two records of each of a number of tensors from each neighbour: those put in even steps, and those
put in odd ones. A record is a message (:mod:`hybridcomp.wire`) of the tensor's bytes and the number of the step; its
CRC-32C tells one that has arrived whole from one that is still being written. MPI promises no order of puts, and says
nothing of when one has arrived: a record that is whole needs neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType
from hybridcomp.codecs import NoneCodec
from hybridcomp.errors import CollectiveTimeoutError, WireError

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

_STEP = 8  # bytes of a step's number, after the tensor's bytes
_POLL_SECONDS = 50e-6
_CODEC = NoneCodec()


class Window:
    """Window on the memory of each rank of a communicator, into which its neighbours put records.

    Making one, and :meth:`Free`, are collective. It is freed with its process group.

    Attributes:
        timeout: seconds that any operation may take.
    """

    def __init__(self, comm: Communicator, neighbours: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        """Make the window.

        Args:
            comm: communicator of all ranks.
            neighbours: neighbours of each rank, in order, which put into its memory.
            sizes: bytes of each tensor.

        Raises:
            CollectiveTimeoutError: not all other ranks come.
        """
        self._comm = comm
        self.timeout = comm.timeout
        self._sizes = [_CODEC.bound(size + _STEP, DType.UINT8) for size in sizes]
        # Align records to multiples of 8 bytes.
        self._offsets = [0, *np.cumsum([-(-size // 8) * 8 for size in self._sizes]).tolist()]
        self._neighbours = neighbours
        self._failed = False
        self._mine: ByteArray
        self._window: Any = self._bounded(self._make, "making a window")
        room = self._offsets[-1]
        self._records = [np.empty(room, np.uint8) for _ in range(2)]
        self._posted: list[dict[int, list[Any]]] = [{}, {}]  # requests by tensor, of even and odd steps
        self._copy = np.empty(max(self._sizes, default=0), np.uint8)

    def _make(self) -> Any:
        from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

        senders = self._neighbours[self._comm.rank]
        window = MPI.Win.Allocate(2 * len(senders) * self._offsets[-1], 1, comm=self._comm.mpi)
        memory: Any = window.tomemory()
        self._mine = np.frombuffer(memory, np.uint8)
        self._mine[:] = 0
        self._comm.mpi.Barrier()  # no rank puts before that
        window.Lock_all(MPI.MODE_NOCHECK)
        return window

    def _bounded(self, work: Callable[[], Any], what: str) -> Any:
        from hybridcomp.collectives.agreement.making import bounded  # noqa: PLC0415  (initialises MPI)

        comm = self._comm
        where = f"{what} on axis {comm.axis!r}, rank {comm.rank} of {comm.size}"
        return bounded(work, lambda: where, self.timeout)

    @property
    def busy(self) -> bool:
        """Tell whether something has failed, so that not all ranks may come to :meth:`Free`."""
        return self._failed or self._comm.failed

    def Free(self) -> None:
        """Release the window, once all ranks have called this; where one does not, it is left to MPI."""
        if self._window is None:
            return
        window, self._window = self._window, None

        def free() -> None:
            window.Unlock_all()
            window.Free()

        with suppress(CollectiveTimeoutError):
            self._bounded(free, "freeing a window")

    def put(self, tensor: int, values: ByteArray, step: int, others: Iterable[int]) -> int:
        """Start to put a tensor into the memory of neighbours; the values may change at once.

        Args:
            tensor: number of the tensor.
            values: bytes of the tensor.
            step: step of training.
            others: neighbours to put to.

        Returns:
            The number of bytes that go to each neighbour.

        Raises:
            CollectiveTimeoutError: a put of two or more steps ago has not ended in time.
        """
        side, size = step % 2, self._sizes[tensor]
        self.progress_until(
            lambda: self._put_done(side, tensor), lambda: f"putting tensor {tensor} of step {step}"
        )
        start = self._offsets[tensor]
        record = self._records[side][start : start + size]
        parts = np.concatenate([values, np.array([step], np.int64).view(np.uint8)])
        _CODEC.encode(parts, record)
        self._posted[side][tensor] = [
            self._window.Rput(record, other, self._place(other, self._comm.rank, side, tensor))
            for other in others
        ]
        return size

    def puts_done(self, step: int) -> bool:
        """Tell whether the memory of all puts of a step may be used again; makes progress."""
        left = [tensor for tensor in self._posted[step % 2] if not self._put_done(step % 2, tensor)]
        return not left

    def _put_done(self, side: int, tensor: int) -> bool:
        requests = self._posted[side].get(tensor, [])
        requests[:] = [request for request in requests if not request.Test()]
        return not requests

    def newest(self, tensor: int, source: int, after: int, out: ByteArray, *, only: int | None = None) -> int:
        """Copy the newest whole record of a neighbour's tensor, if it is of a step after ``after``.

        Args:
            tensor: number of the tensor.
            source: neighbour that has put it.
            after: step that the record must be later than.
            out: array that receives the tensor's bytes.
            only: step of the only record to take; None: any.

        Returns:
            The record's step; ``after`` where there is none, and ``out`` is left unchanged.
        """
        self._window.Sync()
        size = self._sizes[tensor]
        starts = [self._place(self._comm.rank, source, side, tensor) for side in range(2)]
        steps = [int(self._mine[at + size - _STEP : at + size].view(np.int64)[0]) for at in starts]
        for step, at in sorted(zip(steps, starts, strict=True), reverse=True):
            if step <= after or (only is not None and step != only):
                continue
            copy = self._copy[:size]
            copy[:] = self._mine[at : at + size]
            with suppress(WireError):  # the record is being written
                raw, _ = wire.open_message(copy)
                if raw.size == size and int(raw[-_STEP:].view(np.int64)[0]) == step:
                    out[:] = raw[wire.HEADER_BYTES : -_STEP]
                    return step
        return after

    def progress_until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Have MPI make progress until ``done`` returns True.

        Raises:
            CollectiveTimeoutError: it does not in time; ``what`` names the operation.
        """
        deadline = time.monotonic() + self.timeout
        while not done():
            self._comm.mpi.Iprobe()
            if time.monotonic() > deadline:
                self._failed = True
                raise CollectiveTimeoutError(
                    f"{what()} on axis {self._comm.axis!r}, rank {self._comm.rank} of {self._comm.size}, did not end "
                    f"within the timeout of {self.timeout:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def _place(self, owner: int, source: int, side: int, tensor: int) -> int:
        """Return the offset of a record of ``source`` in the memory of ``owner``, in bytes."""
        number = list(self._neighbours[owner]).index(source)
        return int((2 * number + side) * self._offsets[-1] + self._offsets[tensor])
