"""The interface of a process group to torch, apart from its operations: its name, how it is split, how it ends."""

# torch's stubs declare these as methods of C++; here they are Python's.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from hybridcomp.collectives.execution.progress import engine
from hybridcomp.errors import ConfigError
from hybridcomp.torch.backend.arguments import OperationOptions
from hybridcomp.torch.backend.making import make_communicator
from hybridcomp.torch.backend.operations import Starter, start_each
from hybridcomp.torch.backend.options import GroupInit, Options, axis_of
from hybridcomp.torch.backend.work import CommWork, joined
from hybridcomp.torch.memory import pack, unpack
from hybridcomp.torch.profiling import in_range, note, profiling
from hybridcomp.torch.registry import registry
from hybridcomp.torch.untraced import untraced

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator, StatRow
    from hybridcomp.collectives.execution.progress import Request

_LAST_SECONDS = 5.0


@untraced
class Group(ProcessGroup):
    """A process group without its operations.

    Attributes:
        comm: the communicator that carries its messages.
        beside: communicators of the same ranks, for hooks; they end with this group.
        options: options that it was made with; a group split from it gets a copy.
    """

    # Answers to what torch asks of a backend: the group is its own backend.
    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = False
    supports_tensor_alloc = False
    supports_time_estimate = False

    def __init__(self, comm: Communicator, init: GroupInit) -> None:
        """Adapt ``comm``.

        Args:
            comm: communicator that spans the group; the process group frees it.
            init: arguments that both were made from. The axis is the options'; None takes it from the description
                that torch gives later.
        """
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        self.options = init.options
        self._group_init = init
        self._start = Starter(comm)
        self._backend_name = "hybridcomp"
        self._name = ""
        self._desc = "undefined"
        self._coalescing: list[CommWork] | None = None
        self._issued: deque[Request] = deque()
        self._lock = threading.Lock()
        self._profiled = 0
        self._engine = engine()
        self._sequence = 0
        self._splits = 0
        self.beside: list[Communicator] = []
        self._closed = False
        self._pid = os.getpid()
        if init.options.axis is not None:
            comm.axis = init.options.axis

    # -- identity ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name that ``init_process_group`` knows; torch's C++ asks, and casts what is called gloo."""
        return "hybridcomp"

    def name(self) -> str:
        """Return the backend's name, or that of the one in whose place the group is."""
        return self._backend_name

    def _get_backend_name(self) -> str:
        return self._backend_name

    def answer_to(self, name: str) -> None:
        """Take another backend's name, in whose place the group was made: ``HYBRIDCOMP_REPLACE``."""
        self._backend_name = name

    @property
    def group_name(self) -> str:
        """Return torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return torch's description, which names the mesh axis."""
        return self._desc

    @property
    def axis(self) -> str:
        """Return the mesh axis, which selects the policy's section."""
        return self.comm.axis

    @property
    def label(self) -> str:
        """Return the prefix of the group's keys in a saved state."""
        return f"group:{self.comm.axis}"

    def get_group_store(self) -> Store:
        """Return the members' own part of torch's store."""
        return self._group_init.store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        """Set the description, which comes after the group is made, and the same on all its ranks."""
        self._desc = desc
        if self.options.axis is None:
            self.comm.axis = axis_of(desc)
        registry.rank = MPI.COMM_WORLD.Get_rank()
        registry.add(self)

    # -- what torch asks of a backend ----------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, device: torch.device) -> Group:
        """Return the group itself: it is its own backend, on any device."""
        return self

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for operation in list(self._issued):
            operation.wait()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long operations that start from now on may take, those of hooks included."""
        for comm in (self.comm, *self.beside):
            comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are numbered from the start, on all ranks alike."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # -- groups of its ranks -------------------------------------------------------------------------

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Record the device to which the program binds its groups; ranks are connected already."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing where another group is made of other ranks: MPI needs nothing of this one."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Group | None:
        """Make a group of some of its ranks. All of its ranks call this, and only those of the new one meet.

        Args:
            ranks: ranks of this group.
            timeout: timeout of the new group; None is this one's.
            opts: options of the new group; None is a copy of this group's.
            group_name: name of the new group, the same on all of ``ranks``, and new.
            group_desc: description, which names the mesh axis; None is this group's axis.
            device_types: any; one communicator carries all devices' tensors.

        Returns:
            None on a rank that is not among ``ranks``.
        """
        self._splits += 1  # on all ranks of this group alike, whatever names torch gives the new ones
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}:{','.join(map(str, ranks))}"
        options = copy.deepcopy(opts or self.options)
        if group_desc and options.axis == self.options.axis:
            options.axis = None  # torch hands on the parent's options; the description is the new group's own
        elif not group_desc:
            options.axis = options.axis or self.axis
        store = PrefixStore(f"split/{self._splits}/{ranks[0]}/", self._group_init.store)
        members = [self._group_init.ranks[rank] for rank in ranks]
        init = GroupInit(members, list(ranks).index(self.rank()), store, options)
        limit = options.timeout or timeout or timedelta(seconds=self.comm.timeout)
        group = type(self)(make_communicator(init, name, limit), init)
        group.answer_to(self._backend_name)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self._desc}:split")
        return group

    # -- operations ----------------------------------------------------------------------------------

    def _run(
        self,
        op: str,
        tensors: Sequence[torch.Tensor],
        options: OperationOptions,
        start: Callable[..., CommWork],
        columns: Sequence[Sequence[Any]],
        extra: tuple[Any, ...] = (),
    ) -> CommWork:
        """Start an operation, or several as one.

        Args:
            op: name of the operation in profiles.
            tensors: inputs of the operation.
            options: timeout of a wait that is given none, and whether the caller waits at once.
            start: function that starts one operation.
            columns, extra: its arguments: a row of the columns is one operation's, and the others are alike for all.

        Raises:
            RuntimeError: the group is destroyed.
            ConfigError: the process was forked after the group was made.
        """
        if self._closed or os.getpid() != self._pid:
            self._check(op)
        self._sequence += 1
        single = len(columns) == 1 == len(columns[0])
        if profiling():
            work = self._profile(op, tensors, lambda: start_each(start, columns, extra))
        elif not single:
            work = start_each(start, columns, extra)
        elif options.waits:
            self._engine.attending = threading.get_ident()
            try:
                work = start(columns[0][0], *extra)
            finally:
                self._engine.attending = None
        else:
            work = start(columns[0][0], *extra)
        if options.timeout is not None:
            work.limit = options.timeout
        issued = self._issued
        if work.requests or issued:
            with self._lock:
                while issued and issued[0].done:
                    issued.popleft()
                for operation in work.requests:
                    if not operation.done:
                        issued.append(operation)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _profile(self, op: str, tensors: Sequence[torch.Tensor], start: Callable[[], CommWork]) -> CommWork:
        """Start an operation, and have the profiler see it."""
        self._note(1)
        try:
            return in_range(op, tensors, start)
        finally:
            self._note(-1)

    def _note(self, more: int) -> None:
        """Record the operations that the communicator starts while a call is profiled: without, starts are quicker."""
        with self._lock:
            self._profiled += more
            self.comm.on_start = note if self._profiled else None

    def _check(self, op: str) -> None:
        if self._closed:
            raise RuntimeError(f"{op}: process group {self._name!r} has been destroyed")
        if os.getpid() != self._pid:
            raise ConfigError(
                f"{op}: process group {self._name!r} was made by process {self._pid}, from which this one, "
                f"{os.getpid()}, was forked: MPI cannot be used here; fork first, or start processes by spawn"
            )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> CommWork:
        works, self._coalescing = self._coalescing or [], None
        return joined(works)

    # -- memory and statistics (registry.Member) -----------------------------------------------------

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self.comm.stats()

    def memory(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to save: residuals, PowerSGD's factors and the step."""
        return pack(self.comm.feedback, self.comm.warm, self.comm.step)

    def load_memory(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Load the arrays that :meth:`memory` returned."""
        self.comm.step, _ = unpack(arrays, self.comm.feedback, self.comm.warm)

    def advance(self) -> None:
        """Count a training step that has ended."""
        self.comm.step += 1

    # -- end -----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the communicator, and those beside it; ``destroy_process_group`` calls this.

        Operations that nobody waited for get a few seconds to end. If some do not, because another rank has
        left, the communicator is not freed: MPI may still write to their buffers.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        registry.remove(self)
        deadline = time.monotonic() + _LAST_SECONDS
        for operation in list(self._issued):
            with suppress(Exception):
                operation.wait(max(0.0, deadline - time.monotonic()))
        if MPI.Is_finalized():
            return
        for beside in self.beside:
            if not beside.busy:
                beside.Free()
        if all(operation.done for operation in self._issued):
            self.comm.Free()

    def abort(self) -> None:
        """Shut down as :meth:`shutdown` does; an operation in flight keeps its buffers."""
        with suppress(Exception):
            self.shutdown()
