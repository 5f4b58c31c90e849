"""Define ``register_comm_hook(HookState(...), comm_hook)``: the hook that DDP calls for each bucket, and its state.

On a hybridcomp group a bucket in host memory becomes operations of a communicator (:mod:`.operations`). Every other one
is cut into batches, which one thread encodes, sends and decodes while the backward pass goes on, on a group that nobody
else uses; a bucket on a CUDA device is encoded and decoded there, where the kernels run. On one rank there is nothing
to do.
"""

# torch reads the hook's annotations as objects: no `from __future__ import annotations` here.

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from hybridcomp.arrays import Flat, as_dtype, flatten
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.codecs.device.driver import has_driver
from hybridcomp.collectives import StatRow
from hybridcomp.device import Event, Runtime
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import load_policy
from hybridcomp.torch import staging
from hybridcomp.torch.backend.options import PolicyLike, default_policy
from hybridcomp.torch.backend.promise import Promise
from hybridcomp.torch.hook.bucket import Bucket
from hybridcomp.torch.hook.context import HookContext
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.links import open_link
from hybridcomp.torch.hook.plan import Batch, Split, make_plan, make_split
from hybridcomp.torch.hook.schedule import Schedule
from hybridcomp.torch.hook.worker import Worker
from hybridcomp.torch.memory import pack, unpack
from hybridcomp.torch.registry import registry

if TYPE_CHECKING:
    from hybridcomp.torch.hook.operations import Operations

Array = npt.NDArray[Any]
Planned = TypeVar("Planned", list[Batch], Split)


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
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._warmup = self.policy.last_warmup_step
        self._counts = Counts(axis)
        self._open: tuple[HookContext, Schedule] | None = None
        self._operations: Operations | None = None
        self.label = f"hook:{axis}"
        self._worker = Worker(f"hybridcomp-{self.label}")
        registry.add(self)
        # When this goes, its thread ends, and its statistics stay.
        weakref.finalize(self, _end, self._worker, self._counts).atexit = False

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
        comm = getattr(group, "comm", None)  # of a HybridProcessGroup, whatever name the backend was asked by
        hosts = None if comm is None else comm.hosts
        if comm is not None and _in_host_memory(buffer):
            split = self._planned(make_split, bucket.parameters(), buffer, step, hosts)
            operations = self._with_operations(group)
            if last and torch._C._current_graph_task_id() != -1:
                # DDP then waits in compiled code that does not know of the engine: let the engine be waited for first.
                torch.autograd.Variable._execution_engine.queue_callback(operations.wait)
            return operations.average(buffer, split, step)
        plan = self._planned(make_plan, bucket.parameters(), buffer, step, hosts)
        context, schedule = self._opened(group)
        average = _Average(buffer, plan, step, context, schedule)
        self._worker.submit(average.start)
        if last:
            self._worker.submit(schedule.flush)
        return average.promise.future

    def _joined(self) -> Any:
        """Return the group; the default one is looked up at the first bucket, when it exists."""
        if not self._plans:
            registry.rank = dist.get_rank()
        return dist.group.WORLD if self._group is None else self._group

    def _opened(self, group: Any) -> tuple[HookContext, Schedule]:
        if self._open is None:
            link = open_link(group)
            context = HookContext(self.axis, link, self.feedback, self._factors, self._counts)
            self._open = context, Schedule(link, self._worker.tasks)
        return self._open

    def _with_operations(self, group: Any) -> "Operations":
        if self._operations is None:
            from hybridcomp.torch.hook.operations import Operations  # noqa: PLC0415  (initialises MPI)

            self._operations = Operations(
                group, self.policy, self.axis, self.feedback, self._factors, self._counts
            )
        return self._operations

    def _planned(
        self,
        make: Callable[..., Planned],
        parameters: list[torch.Tensor],
        buffer: torch.Tensor,
        step: int,
        hosts: int | None,
    ) -> Planned:
        key = (make, *map(id, parameters), buffer.dtype, min(step, self._warmup))
        plan: Planned | None = self._plans.get(key)
        if plan is None:
            dtype = as_dtype(buffer.dtype)
            if not dtype.is_float:
                raise CodecMismatchError(f"the hook averages floating-point gradients, not {buffer.dtype}")
            named = [(self._name(p), tuple(p.shape)) for p in parameters]
            plan = self._plans[key] = make(self.policy, self.axis, dtype, named, step, self._stage, hosts)
        return plan

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


class _Average:
    """The average of one bucket, from the hook's call until its future is complete."""

    def __init__(
        self, buffer: torch.Tensor, plan: list[Batch], step: int, context: HookContext, schedule: Schedule
    ) -> None:
        self._buffer, self._plan, self._step = buffer, plan, step
        self._context, self._schedule = context, schedule
        self.promise = Promise([buffer.device] if buffer.is_cuda else [])
        self._host = buffer
        self._device = _on_device(buffer, plan)
        # All that the caller's stream has now comes before.
        self._ready: Event | None = None
        self._computed: torch.cuda.Event | None = None
        if self._device is not None:
            runtime: Runtime = self._device.data.runtime
            self._ready = runtime.record(runtime.current_stream(buffer))
        elif buffer.is_cuda:
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed.record(torch.cuda.current_stream(buffer.device))
        self._left = len(plan)
        self._error: Exception | None = None

    def start(self) -> None:
        """Start all batches. In the worker's thread."""
        try:
            if self._computed is not None:
                self._computed.synchronize()
            values = self._device
            if values is None:
                self._host = self._buffer.detach().cpu()
                values = flatten(self._host)
            bucket = Bucket(values, self._plan, self._step, self._context, self._ready)
        except Exception as error:
            self.promise.fail(error)
            return
        if not self._plan:
            self._end()
        for run in bucket.runs():
            self._schedule.start(run, self._batch_done)

    def _batch_done(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self._end()

    def _end(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            if self._device is None and self._host.device != self._buffer.device:
                self._buffer.copy_(self._host)
            # Nothing of ours is under way on a device any more: whatever comes next there may read the buffer.
            self.promise.succeed(self._buffer)
        except Exception as error:
            self.promise.fail(error)


def _in_host_memory(buffer: torch.Tensor) -> bool:
    return not buffer.is_cuda


def _on_device(buffer: torch.Tensor, plan: list[Batch]) -> Flat | None:
    """Return a bucket that is encoded on its device; None where kernels do not run, or not all codecs have any."""
    drivers = buffer.is_cuda and all(has_driver(codec) for batch in plan for codec in batch.codecs())
    if not drivers or not staging.usable(buffer):
        return None
    return flatten(buffer.detach(), device=True)


def _end(worker: Worker, counts: Counts) -> None:
    worker.close()
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
