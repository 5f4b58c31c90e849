"""FSDP2's collectives over a communicator: an operation for each compressed parameter, one for the rest.

Operations of one module are in flight together, so that one parameter is encoded while another is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hybridcomp.policy import Choice
from hybridcomp.torch.backend.reduce_ops import reduction
from hybridcomp.torch.backend.work import CommWork
from hybridcomp.torch.fsdp.segments import NONE, Cut
from hybridcomp.torch.staging import Target, source

if TYPE_CHECKING:
    from hybridcomp.codecs import ErrorFeedback
    from hybridcomp.collectives import Communicator, StatRow

Tensor = torch.Tensor


class CommTransport:
    """A transport over a duplicate of a group's communicator."""

    def __init__(self, comm: Communicator, axis: str, policy: Any, feedback: ErrorFeedback) -> None:
        """Make the duplicate. Collective.

        Raises:
            MismatchError: the ranks' policies differ.
        """
        from hybridcomp.collectives import Communicator  # noqa: PLC0415  (initialises MPI)

        self.comm = Communicator(comm.mpi, policy, axis, timeout=comm.timeout)
        self.comm.feedback = feedback
        self.rank, self.size = self.comm.rank, self.comm.size

    def all_gather(
        self, output: Tensor, own: Tensor, cut: Cut, phase: str, then: Callable[[], None] | None = None
    ) -> CommWork:
        """Start to gather every rank's part.

        Args:
            output: 1-D, all parts.
            own: this rank's part; may lie in ``output``.
            cut: of a part.
            phase: for statistics.
            then: called when ``output`` is there.
        """
        send, target = source(own), Target(output)
        data, stride = target.data, cut.size
        requests = []
        for segment, choice in cut.encoded:
            extents = ([segment.size] * self.size, [r * stride + segment.start for r in range(self.size)])
            mine = send[segment.start : segment.stop]
            requests.append(
                self.comm.start_allgatherv(mine, [data, extents], name=segment.key, phase=phase, codec=choice)
            )
        finish: list[Callable[[], None]] = [target.commit, *([then] if then else [])]
        if cut.exact:
            exact = Choice(NONE, None, cut.reason)
            if not cut.encoded:
                requests.append(self.comm.start_allgather(send, data, phase=phase, codec=exact))
            else:
                packed = torch.cat([send[s.start : s.stop] for s, _ in cut.exact])
                gathered = packed.new_empty(self.size * packed.numel())
                requests.append(self.comm.start_allgather(packed, gathered, phase=phase, codec=exact))
                finish.insert(0, lambda: _unpack(gathered.view(self.size, -1), data.view(self.size, -1), cut))

        def commit() -> None:
            for step in finish:
                step()

        return CommWork(requests, [output], commit)

    def reduce_scatter(self, output: Tensor, given: Tensor, cut: Cut, op: Any) -> None:
        """Reduce all ranks' buffers; this rank gets its part.

        Args:
            output: 1-D, this rank's part.
            given: 1-D, all parts; may be overwritten.
            cut: of a part.
            op: torch's.
        """
        how = reduction(op, given.dtype)
        if how.factor is not None:
            given.mul_(how.factor)
        send, target = source(given), Target(output)
        parts, result = send.view(self.size, -1), target.data
        requests = []
        for segment, choice in cut.encoded:
            whole = parts[:, segment.start : segment.stop].reshape(-1)[: segment.total]
            counts = [segment.count(r) for r in range(self.size)]
            end = segment.start + counts[self.rank]
            requests.append(
                self.comm.start_reduce_scatter(
                    whole,
                    result[segment.start : end],
                    counts,
                    how.op,
                    name=segment.key,
                    phase="backward",
                    codec=choice,
                )
            )
            result[end : segment.stop].zero_()
        unpack = None
        if cut.exact:
            exact = Choice(NONE, None, cut.reason)
            if not cut.encoded:
                requests.append(
                    self.comm.start_reduce_scatter_block(send, result, how.op, phase="backward", codec=exact)
                )
            else:
                packed = torch.cat([parts[:, s.start : s.stop] for s, _ in cut.exact], dim=1).view(-1)
                reduced = packed.new_empty(packed.numel() // self.size)
                requests.append(
                    self.comm.start_reduce_scatter_block(
                        packed, reduced, how.op, phase="backward", codec=exact
                    )
                )
                unpack = (reduced, result)

        def commit() -> None:
            if unpack is not None:
                _unpack(unpack[0].view(1, -1), unpack[1].view(1, -1), cut)
            target.commit()

        CommWork(requests, [output], commit).wait()

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self.comm.stats()


def _unpack(packed: Tensor, rows: Tensor, cut: Cut) -> None:
    """Copy the exact segments, one after another in each row of ``packed``, to their places."""
    pieces = torch.split(packed, [s.size for s, _ in cut.exact], dim=1)
    for (segment, _), piece in zip(cut.exact, pieces, strict=True):
        rows[:, segment.start : segment.stop] = piece
