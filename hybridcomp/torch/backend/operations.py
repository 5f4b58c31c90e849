"""Start torch's collectives on a communicator: each function starts one and returns its work.

``Starter`` stages tensors (:mod:`hybridcomp.torch.staging`), starts the communicator's operation, and says how its
results return to the tensors. Nothing here waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.policy import set_place
from hybridcomp.torch.backend.reduce_ops import Reduction, reduction
from hybridcomp.torch.backend.sparse import all_reduce_sparse
from hybridcomp.torch.backend.work import CommWork, joined
from hybridcomp.torch.phases import about_send, phase
from hybridcomp.torch.staging import Target, overwrite, plain, source, usable
from hybridcomp.torch.zero import broadcast_override

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

Tensors = Sequence[torch.Tensor]
_TAGS_OF_ALL = 32_767  # the largest tag that every MPI takes


class Starter:
    """The collectives of torch on one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    # -- reductions ----------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any, immediate: bool = False) -> CommWork:
        """Reduce ``tensor`` over all ranks, in place; ``immediate`` if the caller would wait for it now."""
        if tensor.layout is torch.sparse_coo:
            return all_reduce_sparse(self.comm, tensor, op)
        how = reduction(op, tensor.dtype)
        commit, array = None, plain(tensor)
        if array is None or not how.plain:
            target = Target(tensor, load=True, dtype=how.dtype)
            _scale(target.data, how.factor)
            commit, array = self._committed(how, target), _given(target.data)
        now = phase()
        if immediate and self.comm.allreduce_immediate(MPI.IN_PLACE, array, how.op, phase=now):
            return CommWork([], [tensor], commit)
        request = self.comm.start_allreduce(MPI.IN_PLACE, array, how.op, OperationOptions(phase=now))
        return CommWork([request], [tensor], commit)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> CommWork:
        """Reduce over all ranks; only the root's ``tensor`` changes."""
        how = reduction(op, tensor.dtype)
        if self.comm.rank == root:
            target = Target(tensor, load=True, dtype=how.dtype)
            _scale(target.data, how.factor)
            request = self.comm.start_reduce(MPI.IN_PLACE, target.data, how.op, root)
            return CommWork([request], [tensor], self._committed(how, target))
        send = _scaled(source(tensor, how.dtype), how.factor)
        return CommWork([self.comm.start_reduce(send, None, how.op, root)], [tensor])

    def reduce_scatter_single(self, output: torch.Tensor, source_: torch.Tensor, op: Any) -> CommWork:
        """Reduce ``source_``, whose part r (of ``output``'s size) goes to rank r."""
        if source_.numel() != self.comm.size * output.numel():
            raise ValueError(
                f"reduce_scatter: the input has {source_.numel()} elements, not {self.comm.size} times "
                f"the output's {output.numel()}"
            )
        how = reduction(op, output.dtype)
        send = _scaled(source(source_, how.dtype), how.factor)
        target = Target(output, dtype=how.dtype)
        request = self.comm.start_reduce_scatter_block(
            _given(send), _given(target.data), how.op, OperationOptions(phase=phase())
        )
        overwrite(output)
        return CommWork([request], [output], self._committed(how, target))

    def reduce_scatter(self, output: torch.Tensor, parts: Tensors, op: Any) -> CommWork:
        """Reduce a list of tensors, of which entry r goes to rank r; they may differ in size."""
        if all(part.numel() == output.numel() for part in parts):
            return self.reduce_scatter_single(output, _packed(parts), op)
        works = []
        for root, part in enumerate(parts):
            mine = root == self.comm.rank
            if mine:
                output.detach().copy_(part.reshape(output.shape))
            works.append(self.reduce(output if mine else part, op, root))
        return joined(works)

    def _committed(self, how: Reduction, target: Target) -> Callable[[], None] | None:
        """Return the function that divides the sum and writes it back, where that remains to be done; else None."""
        if not how.truncates:
            return _committed(target)

        def divide() -> None:
            target.data.div_(self.comm.size, rounding_mode="trunc")
            target.commit()

        return divide

    # -- movement ------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> CommWork:
        """Copy the root's tensor to all ranks."""
        target = Target(tensor, load=self.comm.rank == root)
        codec = broadcast_override()
        request = self.comm.start_bcast(
            _given(target.data), root, OperationOptions(phase=phase(), codec=codec)
        )
        return CommWork([request], [tensor], _committed(target))

    def all_gather_single(self, output: torch.Tensor, source_: torch.Tensor) -> CommWork:
        """Gather every rank's ``source_`` into ``output``; the input may be this rank's part of it."""
        if output.numel() != self.comm.size * source_.numel():
            raise ValueError(
                f"all_gather: the output has {output.numel()} elements, not {self.comm.size} times "
                f"the input's {source_.numel()}"
            )
        target = Target(output)
        send = source(source_)
        request = self.comm.start_allgather(
            _given(send), _given(target.data), OperationOptions(phase=phase())
        )
        overwrite(output)
        return CommWork([request], [output], _committed(target))

    def all_gather(self, outputs: Tensors, source_: torch.Tensor) -> CommWork:
        """Gather into a list of tensors, one per rank; they may differ in size."""
        if all(out.numel() == source_.numel() and out.dtype == source_.dtype for out in outputs):
            send = source(source_)
            flat = torch.empty(self.comm.size * source_.numel(), dtype=source_.dtype, device=send.device)
            request = self.comm.start_allgather(
                _given(send), _given(Target(flat).data), OperationOptions(phase=phase())
            )
            return CommWork([request], list(outputs), lambda: _scatter_out(flat, outputs))
        outputs[self.comm.rank].detach().copy_(source_)
        return joined([self.broadcast(out, root) for root, out in enumerate(outputs)])

    def gather(self, outputs: Tensors, source_: torch.Tensor, root: int) -> CommWork:
        """Gather into the root's list of tensors, all of ``source_``'s size."""
        send = source(source_)
        if self.comm.rank != root:
            return CommWork([self.comm.start_gather(send, None, root)], [])
        flat = torch.empty(self.comm.size * source_.numel(), dtype=source_.dtype, device=send.device)
        request = self.comm.start_gather(send, Target(flat).data, root)
        return CommWork([request], list(outputs), lambda: _scatter_out(flat, outputs))

    def scatter(self, output: torch.Tensor, parts: Tensors, root: int) -> CommWork:
        """Send entry r of the root's list to rank r."""
        target = Target(output)
        send = source(_packed(parts)) if self.comm.rank == root else None
        request = self.comm.start_scatter(send, target.data, root)
        return CommWork([request], [output], _committed(target))

    def all_to_all_single(
        self, output: torch.Tensor, source_: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> CommWork:
        """Send a range of ``source_``'s rows to each rank; empty splits mean equal ones."""
        send, target = source(source_), Target(output)
        outgoing = self._counts(source_, input_splits, "input")
        incoming = self._counts(output, output_splits, "output")
        request = self._alltoallv(send, outgoing, target.data, incoming)
        return CommWork([request], [output], _committed(target))

    def all_to_all(self, outputs: Tensors, sources: Tensors) -> CommWork:
        """Send entry r of a list to rank r, and receive one from each."""
        send = source(_packed(sources))
        incoming = [out.numel() for out in outputs]
        flat = torch.empty(sum(incoming), dtype=sources[0].dtype, device=send.device)
        outgoing = [part.numel() for part in sources]
        request = self._alltoallv(send, outgoing, Target(flat).data, incoming)
        return CommWork([request], list(outputs), lambda: _scatter_out(flat, outputs))

    def _counts(self, tensor: torch.Tensor, splits: list[int], what: str) -> list[int]:
        """Return the number of elements of each rank's part."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.comm.size:
                raise ValueError(
                    f"all_to_all: {rows} rows of {what} cannot be split equally {self.comm.size} ways"
                )
            splits = [rows // self.comm.size] * self.comm.size
        if len(splits) != self.comm.size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: {what} splits {splits} do not cut {rows} rows {self.comm.size} ways"
            )
        row = tensor.numel() // rows if rows else 0
        return [n * row for n in splits]

    def _alltoallv(
        self, send: torch.Tensor, outgoing: list[int], recv: torch.Tensor, incoming: list[int]
    ) -> Any:
        return self.comm.start_alltoallv(
            _parts(send, outgoing), _parts(recv, incoming), OperationOptions(phase=phase())
        )

    # -- point to point, and barrier -----------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> CommWork:
        """Send ``tensor``."""
        _check_tag("send", tag)
        send_phase, there = about_send(tensor, up=dest > self.comm.rank)
        before = set_place(there)
        try:
            return CommWork(
                [self.comm.start_send(_given(source(tensor)), dest, tag, OperationOptions(phase=send_phase))],
                [tensor],
            )
        finally:
            set_place(before)

    def receive(self, tensor: torch.Tensor, source_rank: int, tag: int) -> CommWork:
        """Receive into ``tensor``; ``MPI.ANY_SOURCE`` takes what comes."""
        _check_tag("recv", tag)
        target = Target(tensor)
        request = self.comm.start_recv(_given(target.data), source_rank, tag)
        return CommWork([request], [tensor], _committed(target))

    def barrier(self, _: None = None) -> CommWork:
        """Wait for all ranks."""
        return CommWork([self.comm.start_barrier()], [])


def start_each(
    start: Callable[..., CommWork], columns: Sequence[Sequence[Any]], extra: tuple[Any, ...] = ()
) -> CommWork:
    """Start an operation for each row of ``columns``, and join them."""
    works = [start(*row, *extra) for row in zip(*columns, strict=True)]
    return works[0] if len(works) == 1 else joined(works)


def _check_tag(op: str, tag: int) -> None:
    """Raise ValueError for a tag that MPI does not take: it has fewer than gloo, and says of them that they are bad."""
    if not 0 <= tag <= _most_tag():
        raise ValueError(f"{op}: tag {tag} is none of 0 to {_most_tag()}, which this MPI takes")


@functools.cache
def _most_tag() -> int:
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or _TAGS_OF_ALL)


def _given(data: torch.Tensor) -> Any:
    """Return a buffer for a communicator: an array, where it is one, is parsed by compiled code."""
    array = plain(data)
    return data if array is None else array


def _committed(target: Target) -> Callable[[], None] | None:
    """Return the function that writes a staged result back; None if the result is in place."""
    return target.commit if target.staged else None


def _scale(data: torch.Tensor, factor: float | torch.Tensor | None) -> None:
    if factor is not None:
        data.mul_(factor)


def _scaled(data: torch.Tensor, factor: float | torch.Tensor | None) -> torch.Tensor:
    return data if factor is None else data.mul(factor)


def _packed(parts: Tensors) -> torch.Tensor:
    """Return the tensors' elements one after another; no copy where they already lie so."""
    first = parts[0].detach()
    if len(parts) == 1 and usable(first):
        return first.view(-1)
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _parts(data: torch.Tensor, counts: list[int]) -> list[Any]:
    scale = (
        data.numel() // total if (total := sum(counts)) else 1
    )  # more than 1 where a dtype travels as bytes
    sizes = [n * scale for n in counts]
    return [data, (sizes, [0, *accumulate(sizes[:-1])])]


def _scatter_out(flat: torch.Tensor, outputs: Tensors) -> None:
    for out, part in zip(outputs, torch.split(flat, [out.numel() for out in outputs]), strict=True):
        out.detach().copy_(part.view(out.shape))
