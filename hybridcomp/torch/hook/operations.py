"""Run a hook's buckets in host memory as operations of a communicator: one for the parameters of each codec.

In it each parameter is carried as by itself, so that the bits of a result, and what error feedback keeps, do not depend
on which parameters share a bucket: DDP rebuilds its buckets, and a run may resume with other ones. Small uncompressed
parameters go as one array (:class:`~hybridcomp.collectives.data_path.coalesced.Coalesced`), and so do the rounds of
linear codecs. What waits is the backward pass itself when it has nothing else to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch.futures import Future

from hybridcomp.arrays import DType, Flat, flatten
from hybridcomp.codecs import Codec, ErrorFeedback
from hybridcomp.collectives import Communicator, StatRow
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.collectives.operations import flat_parts, flat_reductions
from hybridcomp.policy import Choice, Policy
from hybridcomp.torch.backend.promise import Promise
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.plan import Piece, Split
from hybridcomp.torch.hook.reduce_tasks import NONE

if TYPE_CHECKING:
    from hybridcomp.collectives.execution.progress import Request
    from hybridcomp.collectives.stats import Call
    from hybridcomp.torch.backend.group import Group

_SMALL = Choice(NONE, None, "small")  # each parameter has its own reason, which statistics tell


class Operations:
    """Starts the operations of one hook, on a duplicate of a process group's communicator that ends with the group.

    Attributes:
        comm: that duplicate.
    """

    def __init__(
        self,
        group: Group,
        policy: Policy,
        axis: str,
        feedback: ErrorFeedback,
        factors: dict[str, npt.NDArray[Any]],
        counts: Counts,
    ) -> None:
        """Make the duplicate. Collective.

        Args:
            group: whose ranks average.
            policy: of the hook; the same on all ranks.
            axis: the policy's section, part of the memory's keys.
            feedback: memories by (axis, parameter).
            factors: PowerSGD's Q by parameter.
            counts: statistics.

        Raises:
            MismatchError: the ranks' policies differ.
        """
        self.comm = Communicator(group.comm.mpi, policy, axis, timeout=group.comm.timeout)
        self.comm.feedback, self.comm.warm = feedback, factors
        self.comm.on_start = self._note
        group.beside.append(self.comm)
        self._counts = counts
        self._call: Call | None = None
        self._flying: list[Request] = []

    def average(self, buffer: torch.Tensor, split: Split, step: int) -> Future[torch.Tensor]:
        """Start to average a bucket, in place.

        Args:
            buffer: in host memory.
            split: its pieces.
            step: of training, for codecs that draw random numbers.

        Returns:
            The buffer, when its last operation has ended.
        """
        values = flatten(buffer.detach(), writable=True)
        bucket = _Bucket(buffer, values.dtype, self._counts, self.comm.size)
        started = []
        if split.small:
            started += self._started(bucket, lambda: [self._start_small(bucket, values, split.small)])
        for pieces in _alike(split.alone):
            started += self._started(bucket, partial(self._start_alike, bucket, values, pieces, step))
        self._flying = [request for request in self._flying if not request.done] + started
        bucket.all_started()
        return bucket.promise.future

    def wait(self) -> None:
        """Wait for all that has been started; how it ended is for the futures."""
        requests, self._flying = self._flying, []
        for request in requests:
            with suppress(Exception):
                request.wait()

    def _started(self, bucket: _Bucket, start: Callable[[], list[Request]]) -> list[Request]:
        """Start operations; if that fails, one that fails, since the other ranks wait for it and have to be told."""
        try:
            return start()
        except Exception as error:
            request = self.comm.start_failed("all_reduce", error)
            bucket.follow(request, self._noted(), [])
            return [request]

    def _start_alike(self, bucket: _Bucket, values: Flat, pieces: list[Piece], step: int) -> list[Request]:
        """Start the pieces that go by one codec: as one operation where the engine does that."""
        request = flat_parts.allreduce_parts(self.comm, values, pieces, AVG, pieces[0].choice, step)
        if request is None:
            return [self._start(bucket, values, piece, step) for piece in pieces]
        bucket.follow(request, self._noted(), pieces)
        return [request]

    def _start(self, bucket: _Bucket, values: Flat, piece: Piece, step: int) -> Request:
        data = values.data[piece.start : piece.stop]
        part = Flat(data, values.dtype, piece.shape, True, False)
        request = flat_reductions.allreduce(
            self.comm, part, part, AVG, piece.name, "backward", piece.choice, step=step
        )
        bucket.follow(request, self._noted(), [piece])
        return request

    def _start_small(self, bucket: _Bucket, values: Flat, pieces: Sequence[Piece]) -> Request:
        """Start the small pieces as one array.

        Which rank adds an element up depends on its place in its parameter alone.
        """
        coalesced = Coalesced([values.data[p.start : p.stop] for p in pieces], self.comm.size)
        coalesced.gather()
        whole = Flat(coalesced.values, values.dtype, coalesced.values.shape, True, False)
        names = ", ".join(piece.name for piece in pieces)
        request = flat_reductions.allreduce(
            self.comm, whole, whole, AVG, names, "backward", _SMALL, algorithm="direct", framed=True
        )
        bucket.follow(request, self._noted(), pieces, coalesced)
        return request

    def _note(self, call: Call) -> None:
        self._call = call

    def _noted(self) -> Call:
        """Return the statistics of the operation that was started last."""
        call, self._call = self._call, None
        assert call is not None
        return call


def _alike(pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    """Group pieces by codec and feedback."""
    groups: dict[tuple[Codec, str | None], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.choice.codec, piece.choice.feedback), []).append(piece)
    return groups.values()


class _Bucket:
    """A bucket, until its last operation has ended; callbacks of operations come in any thread."""

    def __init__(self, buffer: torch.Tensor, dtype: DType, counts: Counts, ranks: int) -> None:
        self.promise = Promise()
        self._buffer, self._dtype, self._counts, self._ranks = buffer, dtype, counts, ranks
        self._left = 1  # for all_started
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def follow(
        self, request: Request, call: StatRow, pieces: Sequence[Piece], coalesced: Coalesced | None = None
    ) -> None:
        """Count an operation, and write its result back, when it has ended."""

        def done(request: Request) -> None:
            error = request.exception
            if error is None:
                try:
                    if coalesced is not None:
                        coalesced.write_back()
                    self._counts.add_operation(call, pieces, self._dtype, self._ranks)
                except Exception as failure:
                    error = failure
            self._one_done(error)

        with self._lock:
            self._left += 1
        request.add_done_callback(done)

    def all_started(self) -> None:
        """Say that no further operation follows."""
        self._one_done(None)

    def _one_done(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            self.promise.succeed(self._buffer)
        else:
            self.promise.fail(self._error)
