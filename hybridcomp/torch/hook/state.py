"""Define ``register_comm_hook(HookState(...), comm_hook)``: the hook that DDP calls for each bucket, and its state."""

# torch reads the hook's annotations as objects: no `from __future__ import annotations` here.

import weakref
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from hybridcomp.policy import load_policy
from hybridcomp.torch.backend.options import PolicyLike, default_policy
from hybridcomp.torch.flat import real_shape
from hybridcomp.torch.hook.averager import Averager, Named
from hybridcomp.torch.untraced import untraced


@untraced
class HookState(Averager):
    """The state that :func:`comm_hook` has from one step to the next: one for each DDP module.

    Error-feedback memory and PowerSGD's factors are kept by parameter name, so buckets may be rebuilt, and a run
    may resume, without a false start. Steps are counted by the last bucket of each.
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

    def submit(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Queue a bucket; see :func:`comm_hook`."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        step, last = self.step, bucket.is_last()
        if last:
            self.step += 1
        averaging = self.average(buffer, lambda: self._named(parameters), tuple(map(id, parameters)), step)
        if averaging is None:
            alone: Future[torch.Tensor] = Future()
            alone.set_result(buffer)
            return alone
        if last:
            self.flush()
        return averaging.future

    def _named(self, parameters: list[torch.Tensor]) -> Named:
        return [(self._name(parameter), real_shape(parameter)) for parameter in parameters]

    def _name(self, parameter: torch.Tensor) -> str:
        module = None if self._module is None else self._module()
        if not self._names and module is not None:
            for name, known in module.named_parameters():
                self._names[id(known)] = name.removeprefix("module.")
        return self._names.setdefault(id(parameter), f"parameter.{len(self._names)}")


def comm_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the group; for ``DistributedDataParallel.register_comm_hook``.

    Args:
        state: state of this module.
        bucket: bucket from DDP; its buffer is overwritten by the average.

    Returns:
        A future of the bucket's buffer. All ranks get the same bits. Gradients that are not finite stay so.

    Raises:
        CodecMismatchError: the gradients are not floating-point.
    """
    return state.submit(bucket)
