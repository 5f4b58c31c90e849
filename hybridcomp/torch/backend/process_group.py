"""``torch.distributed.ProcessGroup`` over a :class:`~hybridcomp.collectives.Communicator`.

A thin adapter: it reads torch's arguments, in the forms of old and new versions (torch 2.13 calls
``all_gather_single`` where earlier ones call ``_allgather_base``), and starts :mod:`.operations`. Every method
returns at once with a work, but for an ``all_reduce`` whose caller would wait, if that is one native call: it is done.
Operations that it cannot offer in any form raise ``NotImplementedError``.
"""

# torch's stubs declare an overload for every form of a method's arguments; here one method reads them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

from hybridcomp.torch.backend.arguments import NO_OPTIONS, operation_options
from hybridcomp.torch.backend.group import Group
from hybridcomp.torch.backend.monitored_barrier import monitored_barrier
from hybridcomp.torch.backend.work import CommWork
from hybridcomp.torch.profiling import profiling
from hybridcomp.torch.untraced import untraced

Tensor = torch.Tensor


@untraced
class HybridProcessGroup(Group):
    """A process group whose messages a policy compresses."""

    # -- reductions ----------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> CommWork:
        """Reduce in place."""
        given = tensors if tensors.__class__ is list else _list(tensors)
        options = operation_options(opts, op, timeout)
        start, immediate = self._start.all_reduce, options.waits and not profiling()
        return self._run("all_reduce", given, options, start, (given,), (options.op, immediate))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> CommWork:
        """Reduce several tensors in place."""
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Reduce to one rank."""
        given, options = _list(tensors), operation_options(opts, op, timeout, root)
        start = self._start.reduce
        return self._run("reduce", given, options, start, (given,), (options.op, options.root))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> CommWork:
        """Reduce a list of tensors; rank r gets entry r."""
        to, options = _list(outputs), operation_options(opts, op, timeout)
        lists = [inputs] if isinstance(outputs, Tensor) else inputs
        start = self._start.reduce_scatter
        return self._run("reduce_scatter", _all(lists), options, start, (to, lists), (options.op,))

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> CommWork:
        """Reduce a tensor; rank r gets its part r."""
        options = operation_options(opts, op, timeout)
        start = self._start.reduce_scatter_single
        return self._run(
            "reduce_scatter_tensor", [source], options, start, ([output], [source]), (options.op,)
        )

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CommWork:
        """Reduce several tensors; rank r gets part r of each."""
        options = operation_options(opts)
        start = self._start.reduce_scatter_single
        return self._run(
            "reduce_scatter_tensor_coalesced", inputs, options, start, (outputs, inputs), (options.op,)
        )

    # -- movement ------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Copy from one rank to all."""
        given, options = _list(tensors), operation_options(opts, timeout, root)
        start = self._start.broadcast
        return self._run("broadcast", given, options, start, (given,), (options.root,))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CommWork:
        """Gather into a list of tensors on every rank."""
        given, options = _list(inputs), operation_options(opts, timeout)
        lists = [outputs] if isinstance(inputs, Tensor) else outputs
        start = self._start.all_gather
        return self._run("all_gather", given, options, start, (lists, given))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CommWork:
        """Gather several tensors; ``outputs`` has a list for each rank, with an entry for each input."""
        by_input = [list(row) for row in zip(*outputs, strict=True)]
        start = self._start.all_gather
        return self._run("all_gather", inputs, operation_options(opts), start, (by_input, inputs))

    def all_gather_single(
        self, output: Tensor, source: Tensor, opts: Any = None, timeout: Any = None
    ) -> CommWork:
        """Gather into one tensor on every rank."""
        start = self._start.all_gather_single
        options = operation_options(opts, timeout)
        return self._run("all_gather_into_tensor", [source], options, start, ([output], [source]))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CommWork:
        """Gather several tensors, each into one."""
        start = self._start.all_gather_single
        return self._run(
            "all_gather_into_tensor_coalesced", inputs, operation_options(opts), start, (outputs, inputs)
        )

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Gather into a list of tensors on one rank."""
        given, options = _list(inputs), operation_options(opts, timeout, root)
        lists = outputs if outputs and not isinstance(outputs[0], Tensor) else [outputs or []]
        start = self._start.gather
        return self._run("gather", given, options, start, (lists, given), (options.root,))

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Send entry r of one rank's list to rank r."""
        to, options = _list(outputs), operation_options(opts, timeout, root)
        lists = inputs if inputs and not isinstance(inputs[0], Tensor) else [inputs or []]
        start = self._start.scatter
        return self._run("scatter", _all(lists), options, start, (to, lists), (options.root,))

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> CommWork:
        """Send a range of rows to each rank."""
        start, to, of = self._start.all_to_all_single, list(output_splits), list(input_splits)
        options = operation_options(opts, timeout)
        return self._run("all_to_all", [source], options, start, ([output], [source]), (to, of))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CommWork:
        """Send a tensor to each rank, and receive one from each."""
        start = self._start.all_to_all
        return self._run("all_to_all", inputs, operation_options(opts, timeout), start, ([outputs], [inputs]))

    # -- point to point, and barriers ----------------------------------------------------------------

    def send(self, tensors: Any, dest: int, tag: int = 0) -> CommWork:
        """Send to one rank."""
        given, start = _list(tensors), self._start.send
        return self._run("send", given, NO_OPTIONS, start, (given,), (dest, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> CommWork:
        """Receive from one rank."""
        given, start = _list(tensors), self._start.receive
        return self._run("recv", given, NO_OPTIONS, start, (given,), (source, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CommWork:
        """Receive from whichever rank sends; the work's ``source_rank`` tells which."""
        given, start = _list(tensors), self._start.receive
        return self._run("recvAnySource", given, NO_OPTIONS, start, (given,), (MPI.ANY_SOURCE, tag))

    def barrier(self, opts: Any = None, timeout: Any = None) -> CommWork:
        """Wait for all ranks."""
        return self._run("barrier", [], operation_options(opts, timeout), self._start.barrier, ([None],))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 names those that do not come.

        Args:
            timeout: longest wait; None is the group's own.
            wait_all_ranks: whether to name all missing ranks, not only the first.

        Raises:
            CollectiveTimeoutError: on every rank that came.
        """
        seconds = self.comm.timeout if timeout is None else timeout.total_seconds()
        self._check("monitored_barrier")
        monitored_barrier(self.comm, seconds, wait_all_ranks)

    # Names of earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _list(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _all(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]
