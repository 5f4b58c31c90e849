"""Start FSDP2's collectives: an operation for each compressed parameter, one for the rest.

On a hybridcomp group operations of one module are in flight together, so that one parameter is encoded while another is
on the wire. On another backend they travel as one exchange; where nothing is compressed, the backend's own operation
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives import StatRow, merge
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.starting import OperationStarter
from hybridcomp.policy import Choice
from hybridcomp.torch.adapting import Adapting
from hybridcomp.torch.backend.op_kinds import factor_of, op_kind
from hybridcomp.torch.backend.work import CommWork
from hybridcomp.torch.exchange.batch import BatchPlan
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.fsdp.native import NativeCollectives
from hybridcomp.torch.fsdp.segments import NONE, Cut
from hybridcomp.torch.profiling import in_range, note, profiled
from hybridcomp.torch.staging import Target, named, source

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

Tensor = torch.Tensor


class Collectives:
    """The collectives of one process group.

    Attributes:
        comm: communicator of the group.
        starter: what starts its operations.
        rank, size: this rank in the group, and the number of ranks.
        hosts: number of hosts that its ranks are on.
    """

    def __init__(
        self, comm: Communicator | TorchCommunicator, native: NativeCollectives | None = None
    ) -> None:
        """Start operations on a communicator; uncompressed ones by ``native``, where it is given."""
        self.comm = comm
        self.starter: OperationStarter[Any] = comm if isinstance(comm, TorchCommunicator) else comm.session
        self._native = native
        self.rank, self.size = comm.rank, comm.size
        self.hosts = comm.hosts

    def all_gather(
        self, output: Tensor, own: Tensor, cut: Cut, phase: str, then: Callable[[], None] | None = None
    ) -> Work:
        """Start to gather every rank's part.

        Args:
            output: 1-D tensor of all parts.
            own: this rank's part; may lie in ``output``.
            cut: cut of a part.
            phase: forward or backward.
            then: function called when ``output`` is there.

        Raises:
            CodecMismatchError: the cut is not of these buffers.
        """
        cut.check("all_gather", own, output, self.size)
        if self._native is not None and self._backend_carries(cut, own):
            return self._native.all_gather(output, own, cut.reason, then or _nothing)
        start = partial(self._start_all_gather, output, own, cut, phase, then)
        return self._start("all_gather_into_tensor", own, start)

    def _start_all_gather(
        self, output: Tensor, own: Tensor, cut: Cut, phase: str, then: Callable[[], None] | None
    ) -> CommWork:
        send, target = source(own), Target(output)
        data, stride = target.data, cut.size
        requests: list[Any] = []
        finish: list[Callable[[], None]] = [target.commit, *([then] if then else [])]
        with self._coalescing("all_gather", data, cut):
            for segment, choice in cut.encoded:
                extents = ([segment.size] * self.size, [r * stride + segment.start for r in range(self.size)])
                mine = send[segment.start : segment.stop]
                options = OperationOptions(segment.key, phase, choice)
                requests.append(self.comm.start_allgatherv(mine, [data, extents], options))
            if cut.exact:
                exact = OperationOptions(None, phase, Choice(NONE, None, cut.reason))
                if not cut.encoded:
                    requests.append(self.comm.start_allgather(send, data, exact))
                else:
                    packed = torch.cat([send[s.start : s.stop] for s, _ in cut.exact])
                    gathered = packed.new_empty(self.size * packed.numel())
                    requests.append(self.comm.start_allgather(packed, gathered, exact))
                    finish.insert(
                        0, lambda: _unpack(gathered.view(self.size, -1), data.view(self.size, -1), cut)
                    )

        def commit() -> None:
            for step in finish:
                step()

        return CommWork(requests, [output], commit)

    def reduce_scatter(self, output: Tensor, given: Tensor, cut: Cut, op: Any) -> None:
        """Reduce all ranks' buffers; this rank gets its part.

        Args:
            output: 1-D tensor, this rank's part.
            given: 1-D tensor of all parts; may be overwritten.
            cut: cut of a part.
            op: torch's reduce operation: a sum, an average or a ``PREMUL_SUM``.

        Raises:
            CodecMismatchError: the cut is not of these buffers.
        """
        cut.check("reduce_scatter", output, given, self.size)
        if self._native is not None and self._backend_carries(cut, given):
            self._native.reduce_scatter(output, given, op, cut.reason)
            return
        start = partial(self._start_reduce_scatter, output, given, cut, op)
        self._start("reduce_scatter_tensor", given, start).wait()

    def _start_reduce_scatter(self, output: Tensor, given: Tensor, cut: Cut, op: Any) -> CommWork:
        kind = op_kind(op)
        if kind == ReduceOp.PREMUL_SUM:
            given.mul_(factor_of(op))
        how = "avg" if kind == ReduceOp.AVG else self._sum()
        send, target = source(given), Target(output)
        parts, result = send.view(self.size, -1), target.data
        requests: list[Any] = []
        unpack = None
        with self._coalescing("reduce_scatter", result, cut):
            for segment, choice in cut.encoded:
                whole = segment.whole(parts)
                counts = [segment.count(r) for r in range(self.size)]
                end = segment.start + counts[self.rank]
                room = result[segment.start : end]
                options = OperationOptions(segment.key, "backward", choice)
                requests.append(self.comm.start_reduce_scatter(whole, room, counts, how, options))
                result[end : segment.stop].zero_()
            if cut.exact:
                options = OperationOptions(None, "backward", Choice(NONE, None, cut.reason))
                packed, reduced = send, result
                if cut.encoded:
                    packed = torch.cat([parts[:, s.start : s.stop] for s, _ in cut.exact], dim=1).view(-1)
                    reduced = packed.new_empty(packed.numel() // self.size)
                    unpack = (reduced, result)
                requests.append(self.comm.start_reduce_scatter_block(packed, reduced, how, options))

        def commit() -> None:
            if unpack is not None:
                _unpack(unpack[0].view(1, -1), unpack[1].view(1, -1), cut)
            target.commit()

        return CommWork(requests, [output], commit)

    def _start(self, op: str, given: Tensor, start: Callable[[], CommWork]) -> CommWork:
        """Start a collective, and have a profiler see it, and its operations, until it ends."""
        if not profiled():
            return start()
        self.comm.on_start = note
        try:
            return in_range(op, [given], start)
        finally:
            self.comm.on_start = None

    def _backend_carries(self, cut: Cut, values: Tensor) -> bool:
        """Tell whether the backend's own collective carries a cut: nothing is encoded, and it knows hosts as well.

        gloo's sends each byte to a host of several ranks as often as it has ranks.
        """
        if cut.encoded:
            return False
        comm = self.comm
        levelled = isinstance(comm, TorchCommunicator) and comm.host_memory and comm.topology.tiered
        return not (levelled and values.is_floating_point() and named(values))

    def observe(self, adapting: Adapting, given: Tensor, cut: Cut, feedback: ErrorFeedback) -> None:
        """Show an adaptation the values that :meth:`reduce_scatter` is about to send.

        Args:
            adapting: adaptation of the operation.
            given, cut: as for :meth:`reduce_scatter`.
            feedback: error feedback that has the residuals.
        """
        parts = given.view(self.size, -1)
        for segment, _ in [*cut.encoded, *cut.exact]:
            adapting.observe(segment.name, segment.whole(parts), feedback, segment.key)

    def _sum(self) -> Any:
        if isinstance(self.comm, TorchCommunicator):
            return "sum"
        from mpi4py import MPI  # noqa: PLC0415  (initialises it)

        return MPI.SUM

    def _coalescing(self, op: str, data: Tensor, cut: Cut) -> AbstractContextManager[None]:
        """Let operations travel together, where those of a communicator do not go on by themselves."""
        if not isinstance(self.comm, TorchCommunicator):
            return nullcontext()
        parts = [(choice, segment.total) for segment, choice in cut.encoded]
        if cut.exact:
            size = sum(segment.size for segment, _ in cut.exact)
            parts.append((Choice(NONE, None, cut.reason), size))
        layout = tuple((segment.size, segment.total) for segment, _ in [*cut.encoded, *cut.exact])
        plan = BatchPlan.of(op, as_dtype(data.dtype), parts, layout, self.comm.topology)
        return self.comm.coalescing(plan, on_host=not data.is_cuda)

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        tables = [self.comm.stats(), *([] if self._native is None else [self._native.stats()])]
        return merge(tables)


def _nothing() -> None:
    """Do nothing."""


def _unpack(packed: Tensor, rows: Tensor, cut: Cut) -> None:
    """Copy the exact segments, one after another in each row of ``packed``, to their places."""
    pieces = torch.split(packed, [s.size for s, _ in cut.exact], dim=1)
    for (segment, _), piece in zip(cut.exact, pieces, strict=True):
        rows[:, segment.start : segment.stop] = piece
