"""``torch.distributed.ProcessGroup`` over a :class:`~hybridcomp.collectives.Communicator`.

A thin adapter: it reads torch's arguments, in the forms of old and new versions (torch 2.13 calls
``all_gather_single`` where earlier ones call ``_allgather_base``), and starts :mod:`.operations`. Every method
returns at once with a work. What it has to offer no version for raises ``NotImplementedError``.
"""

# torch's stubs declare an overload for every form of a method's arguments; here one method reads them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from mpi4py import MPI
from torch.distributed import ProcessGroup

from hybridcomp.errors import CollectiveTimeoutError
from hybridcomp.torch.memory import pack, unpack
from hybridcomp.torch.operations import Starter, start_each
from hybridcomp.torch.options import axis_of
from hybridcomp.torch.registry import registry
from hybridcomp.torch.work import CommWork, joined

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator, StatRow
    from hybridcomp.collectives.engine import Request as Operation

Tensor = torch.Tensor
_MONITOR_TAG = 32_001  # of monitored_barrier's messages
_LAST_SECONDS = 5.0


class HybridProcessGroup(ProcessGroup):
    """A process group whose messages a policy compresses.

    Attributes:
        comm: the communicator that carries them.
    """

    def __init__(self, comm: Communicator, axis: str | None) -> None:
        """Adapt ``comm``.

        Args:
            comm: spans the group; the process group frees it.
            axis: the mesh axis; None takes it from the description that torch gives later.
        """
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        self._start = Starter(comm)
        self._axis = axis
        self._name = ""
        self._desc = "undefined"
        self._coalescing: list[CommWork] | None = None
        self._pending: set[Operation] = set()
        self._closed = False
        if axis is not None:
            comm.axis = axis

    # -- identity ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name that ``init_process_group`` knows."""
        return "hybridcomp"

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """torch's description, which names the mesh axis."""
        return self._desc

    @property
    def axis(self) -> str:
        """The mesh axis, which selects the policy's section."""
        return self.comm.axis

    @property
    def label(self) -> str:
        """What names the group in a saved state."""
        return f"group:{self.comm.axis}"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        """The description comes after the group is made, and the same on all its ranks."""
        self._desc = desc
        if self._axis is None:
            self.comm.axis = axis_of(desc)
        registry.rank = MPI.COMM_WORLD.Get_rank()
        registry.add(self)

    # -- reductions ----------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> CommWork:
        """Reduce in place."""
        return self._issue(start_each(self._start.all_reduce, _list(tensors), extra=(_op(opts, op),)))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> CommWork:
        """Reduce several tensors in place."""
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Reduce to one rank."""
        to = _root(opts, root)
        return self._issue(start_each(self._start.reduce, _list(tensors), extra=(_op(opts, op), to)))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> CommWork:
        """Reduce a list of tensors; rank r gets entry r."""
        lists = [inputs] if isinstance(outputs, Tensor) else inputs
        return self._issue(
            start_each(self._start.reduce_scatter, _list(outputs), lists, extra=(_op(opts, op),))
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> CommWork:
        """Reduce a tensor; rank r gets its part r."""
        return self._issue(self._start.reduce_scatter_single(output, source, _op(opts)))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CommWork:
        """Reduce several tensors; rank r gets part r of each."""
        return self._issue(start_each(self._start.reduce_scatter_single, outputs, inputs, extra=(_op(opts),)))

    # -- movement ------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Copy from one rank to all."""
        return self._issue(start_each(self._start.broadcast, _list(tensors), extra=(_root(opts, root),)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CommWork:
        """Gather into a list of tensors on every rank."""
        lists = [outputs] if isinstance(inputs, Tensor) else outputs
        return self._issue(start_each(self._start.all_gather, lists, _list(inputs)))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CommWork:
        """Gather several tensors; ``outputs`` has a list for each rank, with an entry for each input."""
        by_input = [list(row) for row in zip(*outputs, strict=True)]
        return self._issue(start_each(self._start.all_gather, by_input, inputs))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> CommWork:
        """Gather into one tensor on every rank."""
        return self._issue(self._start.all_gather_single(output, source))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CommWork:
        """Gather several tensors, each into one."""
        return self._issue(start_each(self._start.all_gather_single, outputs, inputs))

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Gather into a list of tensors on one rank."""
        sources = _list(inputs)
        lists = outputs if outputs and not isinstance(outputs[0], Tensor) else [outputs or []]
        return self._issue(start_each(self._start.gather, lists, sources, extra=(_root(opts, root),)))

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CommWork:
        """Give entry r of one rank's list to rank r."""
        lists = inputs if inputs and not isinstance(inputs[0], Tensor) else [inputs or []]
        return self._issue(start_each(self._start.scatter, _list(outputs), lists, extra=(_root(opts, root),)))

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
        return self._issue(
            self._start.all_to_all_single(output, source, list(output_splits), list(input_splits))
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CommWork:
        """Send a tensor to each rank, and receive one from each."""
        return self._issue(self._start.all_to_all(outputs, inputs))

    # -- point to point, and barriers ----------------------------------------------------------------

    def send(self, tensors: Any, dest: int, tag: int = 0) -> CommWork:
        """Send to one rank."""
        return self._issue(start_each(self._start.send, _list(tensors), extra=(dest, tag)))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> CommWork:
        """Receive from one rank."""
        return self._issue(start_each(self._start.receive, _list(tensors), extra=(source, tag)))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CommWork:
        """Receive from whichever rank sends; the work's ``source_rank`` tells which."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def barrier(self, opts: Any = None, timeout: Any = None) -> CommWork:
        """Wait for all ranks."""
        return self._issue(self._start.barrier())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 names those that do not come.

        Args:
            timeout: None is the group's own.
            wait_all_ranks: name all missing ranks, not only the first.

        Raises:
            CollectiveTimeoutError: on every rank that came.
        """
        seconds = timeout.total_seconds() if timeout else self.comm.timeout
        deadline = time.monotonic() + seconds
        rank, size, token = self.comm.rank, self.comm.size, torch.zeros(1, dtype=torch.uint8)
        if rank:
            self.comm.Isend(token, 0, _MONITOR_TAG)
            self.comm.Irecv(token, 0, _MONITOR_TAG).wait(seconds)
            return
        arrivals = {q: self.comm.Irecv(token.clone(), q, _MONITOR_TAG) for q in range(1, size)}
        missing = []
        for q, request in arrivals.items():
            try:
                request.wait(max(0.0, deadline - time.monotonic()))
            except CollectiveTimeoutError:
                missing.append(q)
                if not wait_all_ranks:
                    break
        if missing:
            raise CollectiveTimeoutError(
                f"monitored_barrier on axis {self.axis!r}: rank{'s' if len(missing) > 1 else ''} "
                f"{', '.join(map(str, missing))} did not arrive within {seconds:g} s"
            )
        joined([self._start.send(token, q, _MONITOR_TAG) for q in arrivals]).wait()

    # -- torch's batches -----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> CommWork:
        works, self._coalescing = self._coalescing or [], None
        return joined(works)

    def _issue(self, work: CommWork) -> CommWork:
        for operation in (operation for request in work.requests for operation in request.operations):
            if not operation.done:
                self._pending.add(operation)
                operation.add_done_callback(self._pending.discard)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # -- memory and statistics (registry.Member) -----------------------------------------------------

    def rows(self) -> list[StatRow]:
        """Statistics up to now."""
        return self.comm.stats()

    def memory(self) -> dict[str, npt.NDArray[Any]]:
        """What to save: residuals, PowerSGD's factors and the step."""
        return pack(self.comm.feedback, self.comm.warm, self.comm.step)

    def load_memory(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Take back what :meth:`memory` gave."""
        self.comm.step = unpack(arrays, self.comm.feedback, self.comm.warm)

    def advance(self) -> None:
        """A training step has ended."""
        self.comm.step += 1

    # -- end -----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the communicator; ``destroy_process_group`` calls this.

        Operations that nobody waited for get a few seconds to end. If some do not, because another rank has
        left, the communicator is not freed: MPI may still write to their buffers.
        """
        if self._closed:
            return
        self._closed = True
        registry.remove(self)
        deadline = time.monotonic() + _LAST_SECONDS
        for operation in list(self._pending):
            with suppress(Exception):
                operation.wait(max(0.0, deadline - time.monotonic()))
        if not self._pending and not MPI.Is_finalized():
            self.comm.Free()

    def abort(self) -> None:
        """As :meth:`shutdown`; an operation in flight keeps its buffers."""
        with suppress(Exception):
            self.shutdown()

    # Names of earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op(opts: Any, op: Any = None) -> Any:
    """The reduce operation of an options object, or given in its place."""
    return op if opts is None else opts


def _root(opts: Any, root: int | None = None) -> int:
    """The root of an options object, or given in its place."""
    if root is not None:
        return root
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))
