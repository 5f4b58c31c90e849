"""Define ``register_comm_hook(HookState(...), comm_hook)``: the hook that DDP calls for each bucket, and its state."""

# torch reads the hook's annotations as objects: no `from __future__ import annotations` here.

import functools
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.policy import load_policy
from hybridcomp.torch.backend.options import PolicyLike, default_policy
from hybridcomp.torch.flat import real_shape
from hybridcomp.torch.hook.averager import Averager, Named, done, parameter_names
from hybridcomp.torch.untraced import untraced


@untraced
class HookState(Averager):
    """The state that :func:`comm_hook` has from one step to the next: one for each DDP module.

    Error-feedback memory and PowerSGD's factors are kept by parameter name, so buckets may be rebuilt, and a run
    may resume, without a false start. Steps are counted by the last bucket of each.

    It can be pickled and deep-copied, as torch's own states can: with its policy, and the memory that
    :func:`hybridcomp.torch.state_dict` saves of it, without module and process group. What comes of that takes those of
    the DDP module that it is registered with, or of :meth:`attach`.
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
            policy: policy as :func:`hybridcomp.load_policy` takes it; None is the default of
                :func:`hybridcomp.torch.set_policy`. The same on all ranks.
            module: module that gives parameters their names, for a policy's ``exclude``, and if it is the DDP module
                its process group. Without it a parameter is named by its place: ``parameter.0``.
            process_group: process group that DDP reduces over; None is the module's, or else the default group.
            axis: the policy's section.
            stage: pipeline stage that the module is; for a policy's ``stages``.

        Raises:
            PolicyError: the policy cannot be read.
        """
        chosen = default_policy() if policy is None else load_policy(policy)
        group = process_group or getattr(module, "process_group", None)
        super().__init__(chosen, kind="hook", axis=axis, group=group, stage=stage)
        # DDP's C++ keeps this object, and would keep the module that it belongs to.
        self._module = None if module is None else weakref.ref(module)
        self._names: dict[int, str] = {}
        self._lost_names = False

    def attach(self, module: torch.nn.Module) -> None:
        """Take parameters' names and the process group from a module, for a state that was copied or unpickled.

        ``register_comm_hook`` of a DDP module does it; a hook that calls :func:`comm_hook` with a state inside its own
        has to. Other states stay as they are.

        Args:
            module: module whose gradients are averaged.
        """
        if self._listed:
            return
        self.register()
        self._group = getattr(module, "process_group", None)
        if self._lost_names:
            self._module, self._lost_names = weakref.ref(module), False

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None and self._group is not dist.group.WORLD:
            warnings.warn(
                "a HookState is saved without its process group, and has the module's later", stacklevel=2
            )
        saved = {"policy": self.policy, "axis": self.axis, "stage": self._stage}
        return {**saved, "named": self._lost_names or self._module is not None, "memory": self.memory()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(state["policy"], kind="hook", axis=state["axis"], stage=state["stage"], listed=False)
        self._module, self._names, self._lost_names = None, {}, state["named"]
        self.load_memory(state["memory"])

    def submit(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Queue a bucket; see :func:`comm_hook`."""
        if not self._listed:
            self._go_on_alone()
        buffer, parameters = bucket.buffer(), bucket.parameters()
        step, last = self.step, bucket.is_last()
        if last:
            self.step += 1
        if buffer.layout is not torch.strided:
            if last:
                self.flush()
            return self.let_through(buffer, "sparse gradients go as DDP sends them")
        averaging = self.average(buffer, lambda: self._named(parameters), tuple(map(id, parameters)), step)
        if averaging is None:
            return done(buffer)
        if last:
            self.flush()
        return averaging.future

    def _go_on_alone(self) -> None:
        self.register()
        if self._lost_names:
            warnings.warn(
                "a HookState that was copied or unpickled knows no names of parameters, by which it keeps its memory: "
                "call its attach(module) first",
                stacklevel=2,
            )

    def _named(self, parameters: list[torch.Tensor]) -> Named:
        return [(self._name(parameter), real_shape(parameter)) for parameter in parameters]

    def _name(self, parameter: torch.Tensor) -> str:
        module = None if self._module is None else self._module()
        if not self._names and module is not None:
            self._names = parameter_names(module)
        return self._names.setdefault(id(parameter), f"parameter.{len(self._names)}")


def comm_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the group; for ``DistributedDataParallel.register_comm_hook``.

    Args:
        state: state of this module.
        bucket: bucket from DDP; its buffer is overwritten by the average.

    Returns:
        A future of the bucket's buffer. All ranks get the same bits. Gradients that are not finite stay so. Sparse ones
        are averaged as DDP does it without a hook.

    Raises:
        CodecMismatchError: the gradients are neither floating-point nor complex.
    """
    return state.submit(bucket)


def install() -> None:
    """Patch DDP, once, so that a state which was copied or unpickled takes names from its new module."""
    theirs: Any = DistributedDataParallel.register_comm_hook
    if getattr(theirs, "hybridcomp", False):
        return

    @functools.wraps(theirs)
    def register_comm_hook(self: Any, state: Any, hook: Any) -> Any:
        if isinstance(state, HookState):
            state.attach(self)
        return theirs(self, state, hook)

    register_comm_hook.hybridcomp = True  # type: ignore[attr-defined]
    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]
