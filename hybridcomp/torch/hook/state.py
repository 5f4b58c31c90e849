"""Define ``register_comm_hook(HookState(...), comm_hook)``: the hook that DDP calls for each bucket, and its state.

A bucket becomes operations of a communicator (:mod:`.operations`): of MPI's on a hybridcomp group, on every other
backend of a process group that nobody else uses (:mod:`.over_torch`). A bucket on a CUDA device is encoded and decoded
there, where the kernels run. On one rank there is nothing to do.
"""

# torch reads the hook's annotations as objects: no `from __future__ import annotations` here.

import weakref
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.answers import Answers
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import load_policy
from hybridcomp.torch.backend.options import PolicyLike, default_policy
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.operations import MpiOperations, Operations
from hybridcomp.torch.hook.over_torch import TorchOperations
from hybridcomp.torch.hook.plan import Split, make_split
from hybridcomp.torch.memory import pack, unpack
from hybridcomp.torch.registry import registry

Array = npt.NDArray[Any]


class HookState:
    """The state that :func:`comm_hook` has from one step to the next: one for each DDP module.

    Error-feedback memory and PowerSGD's factors are kept by parameter name, so buckets may be rebuilt, and a run
    may resume, without a false start.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        module: torch.nn.Module | None = None,
        process_group: Any = None,
        axis: str = "dp",
        stage: int | None = None,
    ) -> None:
        """Load the policy; the group is made by the first bucket.

        Args:
            policy: as :func:`hybridcomp.load_policy` takes it; None is the default of
                :func:`hybridcomp.torch.set_policy`. The same on all ranks.
            module: gives parameters their names, for a policy's ``exclude``, and if it is the DDP module its
                process group. Without it a parameter is named by its place: ``parameter.0``.
            process_group: that DDP reduces over; None is the module's, or else the default group.
            axis: the policy's section.
            stage: of a pipeline, that the module is; for a policy's ``stages``.

        Raises:
            PolicyError: the policy cannot be read.
        """
        self.policy = default_policy() if policy is None else load_policy(policy)
        self.axis = axis
        self._stage = stage
        self.step = 0
        self.feedback = ErrorFeedback(form=None)
        self._factors: dict[str, Array] = {}
        # DDP's C++ keeps this object, and would keep the module that it belongs to.
        self._module = None if module is None else weakref.ref(module)
        self._group = process_group or getattr(module, "process_group", None)
        self._names: dict[int, str] = {}
        self._plans: Answers[Split] = Answers()
        self._counts = Counts(axis)
        self._operations: Operations | None = None
        self.label = f"hook:{axis}"
        registry.add(self)
        # When this goes, its statistics stay.
        weakref.finalize(self, _keep, self._counts).atexit = False

    def submit(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Queue a bucket; see :func:`comm_hook`."""
        group = self._joined()
        buffer = bucket.buffer()
        step, last = self.step, bucket.is_last()
        if last:
            self.step += 1
        if group.size() == 1:
            self._counts.add_alone(buffer.nbytes)
            alone: Future[torch.Tensor] = Future()
            alone.set_result(buffer)
            return alone
        operations = self._with_operations(group)
        plan = self._planned(bucket.parameters(), buffer, step, group)
        future = operations.average(buffer, plan, step)
        if last:
            operations.flush()
        return future

    def _joined(self) -> Any:
        """Return the group; the default one is looked up at the first bucket, when it exists."""
        if not self._plans:
            registry.rank = dist.get_rank()
        return dist.group.WORLD if self._group is None else self._group

    def _with_operations(self, group: Any) -> Operations:
        if self._operations is None:
            comm = getattr(group, "comm", None)  # of a HybridProcessGroup, whatever the backend's name
            if comm is None:
                exchanges, name = ExchangeGroup(group), f"hybridcomp-{self.label}"
                own = TorchCommunicator(exchanges, self.policy, self.axis, self.feedback, name)
                self.policy = own.policy
                own.warm = self._factors
                self._operations = TorchOperations(own, self._counts)
                own.on_start = self._operations.note
            else:
                from hybridcomp.collectives import Communicator  # noqa: PLC0415  (initialises MPI)

                beside = Communicator(comm.mpi, self.policy, self.axis, timeout=comm.timeout)
                self.policy = beside.policy
                beside.feedback = self.feedback
                group.beside.append(beside)  # it ends with the group
                beside.warm = self._factors
                self._operations = MpiOperations(beside, self._counts)
                beside.on_start = self._operations.note
        return self._operations

    def _planned(self, parameters: list[torch.Tensor], buffer: torch.Tensor, step: int, group: Any) -> Split:
        comm = self._with_operations(group).comm

        def made() -> Split:
            dtype = as_dtype(buffer.dtype)
            if not dtype.is_float:
                raise CodecMismatchError(f"the hook averages floating-point gradients, not {buffer.dtype}")
            named = [(self._name(p), tuple(p.shape)) for p in parameters]
            hosts = None if getattr(group, "comm", None) is None else group.comm.hosts
            asked = comm.decider or self.policy
            return make_split(asked, self.axis, dtype, named, step, self._stage, hosts)

        key = (*map(id, parameters), buffer.dtype, self.policy.same_as_step(step))
        return self._plans.get(comm, key, made)

    def _name(self, parameter: torch.Tensor) -> str:
        module = None if self._module is None else self._module()
        if not self._names and module is not None:
            for name, known in module.named_parameters():
                self._names[id(known)] = name.removeprefix("module.")
        return self._names.setdefault(id(parameter), f"parameter.{len(self._names)}")

    # -- memory and statistics (registry.Member) -----------------------------------------------------

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self._counts.rows()

    def memory(self) -> dict[str, Array]:
        """Return the arrays to save: residuals, PowerSGD's factors and the step. Call it between steps."""
        return pack(self.feedback, self._factors, self.step)

    def load_memory(self, arrays: dict[str, Array]) -> None:
        """Load the arrays that :meth:`memory` returned."""
        self.step = unpack(arrays, self.feedback, self._factors)

    def advance(self) -> None:
        """Do nothing: this counts steps by the last bucket of each."""


def _keep(counts: Counts) -> None:
    registry.keep(counts.rows())


def comm_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the group; for ``DistributedDataParallel.register_comm_hook``.

    Args:
        state: of this module.
        bucket: from DDP; its buffer is overwritten by the average.

    Returns:
        A future of the bucket's buffer. All ranks get the same bits. Gradients that are not finite stay so.

    Raises:
        CodecMismatchError: the gradients are not floating-point.
    """
    return state.submit(bucket)
