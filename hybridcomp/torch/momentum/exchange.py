"""Exchange momenta in the place of gradients: the state of the DDP hook beneath an optimizer of this package.

In steps that exchange gradients it is :class:`~hybridcomp.torch.hook.HookState`, under the policy of the warm-up. In
all others each rank turns the gradient of a bucket into its local momentum, and a second averager takes that, with
error feedback of its own, since its values are of another size: what comes back is the new momentum, the same on all
ranks, where DDP expects the gradient. Where the kernels correct messages, they compute the momentum in the same pass
over memory, else it is written to the bucket.

Elements whose variance is still to be renewed take part in a momentum's message with zeros, and their gradients travel
beside it, under the policy of the warm-up, without feedback.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from hybridcomp.policy import Policy
from hybridcomp.policy.message import MOMENTUM
from hybridcomp.torch.hook import HookState
from hybridcomp.torch.hook.averager import Averager, Blend, done
from hybridcomp.torch.untraced import untraced

Tensor = torch.Tensor
_Join = tuple[Callable[[Tensor], None], Tensor]


class Apart(NamedTuple):
    """Elements of a parameter whose gradients travel apart.

    Attributes:
        parameter: the parameter.
        gradient: local gradients of the elements, 1-D and real.
        join: function that puts the new momenta of the elements, made of their mean gradients, where the others are.
    """

    parameter: Tensor
    gradient: Tensor
    join: Callable[[Tensor], None]


class Owner(Protocol):
    """Optimizer that an exchange belongs to."""

    @property
    def exchanges_momentum(self) -> bool:
        """Tell whether the next step takes momenta, not gradients."""

    @property
    def steps_alone(self) -> bool:
        """Tell whether the next step takes each rank's own gradients, and nothing is exchanged."""

    def localize(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float,
        blended: Collection[Tensor],
    ) -> tuple[list[Apart], dict[Tensor, Blend]]:
        """Turn gradients into the local momenta, in place.

        Args:
            parameters: parameters of a bucket.
            gradients: their local gradients, times ``scale``; the reals of complex ones.
            scale: scale of the loss.
            blended: parameters whose gradients may be left as they are but for the scale and the weight decay, as the
                averager blends them with the momentum.

        Returns:
            The gradients that travel apart, and the momenta of the gradients that are left.
        """


@untraced
class MomentumExchange(HookState):
    """The state of the hook of one optimizer and its DDP module.

    Attributes:
        momentum: averager of the momenta.
        process_group: the ranks.
        scaler: ``torch.amp.GradScaler`` of the training loop, or None.
        arrived: what the last backward pass has exchanged and no step has taken: ``"gradient"``, ``"momentum"``,
            ``"alone"`` for this rank's own gradients, or None.
    """

    def __init__(
        self,
        owner: Owner,
        module: Any,
        policies: tuple[Policy, Policy],
        axis: str,
        scaler: Any,
        stage: int | None = None,
    ) -> None:
        """Make the averagers; the first array of each makes its communicator.

        Args:
            owner: the optimizer.
            module: DDP module.
            policies: policy of gradients, and policy of momenta, which has them in a section ``momentum`` or in that of
                the axis.
            axis: the policies' section.
            scaler: scaler of the loss.
            stage: pipeline stage that the module is; for a policy's ``stages``.
        """
        gradients, momenta = policies
        super().__init__(gradients, module=module, axis=axis, stage=stage)
        self.process_group = group = module.process_group
        own = MOMENTUM if MOMENTUM in momenta.axes else axis
        self.momentum = Averager(momenta, kind="momentum", axis=own, group=group, stage=stage)
        # Other elements may travel apart in the next step, which are no place to make up for what these have lost.
        self._beside = Averager(gradients, kind="apart", axis=axis, group=group, stage=stage, remembers=False)
        self.scaler = scaler
        self.arrived: str | None = None
        self._owner = weakref.ref(owner)
        self._scale = 1.0
        self._before: dict[str, npt.NDArray[Any]] | None = None
        self._finite = True  # this rank's gradients of a pass without exchange
        self._momenta: dict[Tensor, Tensor] = {}
        self._apart: dict[Tensor, Tensor] = {}
        module.register_forward_pre_hook(_refuse_twice)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "the hook of an optimizer cannot be copied: save hct.state_dict() and the optimizer's"
        )

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Queue a bucket; see :func:`~hybridcomp.torch.comm_hook`."""
        owner: Owner | None = self._owner()
        alone = owner is not None and owner.steps_alone
        momenta = not alone and owner is not None and owner.exchanges_momentum
        if bucket.index() == 0:
            self._begin(momenta, alone)
        if alone:
            return self._pass_alone(bucket)
        future = self._submit(owner, bucket) if owner is not None and momenta else super().submit(bucket)
        if bucket.is_last():
            self.arrived = "momentum" if momenta else "gradient"
        return future

    def _begin(self, momenta: bool, alone: bool) -> None:
        if self.arrived is not None:
            self.take_back()  # nobody has taken what the last pass exchanged
        self._momenta.clear()
        self._apart.clear()
        scaled = self.scaler is not None and self.scaler.is_enabled()
        self._scale = float(self.scaler.get_scale()) if scaled else 1.0
        self._before = self.momentum.memory() if scaled and (momenta or alone) else None
        self._finite = True

    def _pass_alone(self, bucket: GradBucket) -> Future[Tensor]:
        """Leave a bucket's gradients as they are; with a scaler, tell the other ranks of an overflow.

        All ranks must skip the same steps: where one has an overflow, the last bucket of all is made to have one.
        """
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise TypeError("momenta of sparse gradients are not exchanged")
        self._finite = self._finite and (self._before is None or bool(torch.isfinite(buffer).all()))
        if bucket.is_last():
            self.momentum.step += 1
            self.step += 1
            self.arrived = "alone"
            if self._before is not None and not self._all_finite(buffer.device):
                buffer.fill_(math.inf)
        return done(buffer)

    def _all_finite(self, device: torch.device) -> bool:
        """Tell whether all ranks' gradients are finite; collective."""
        overflows = torch.tensor([not self._finite], dtype=torch.float32, device=device)
        dist.all_reduce(overflows, dist.ReduceOp.MAX, group=self.process_group)
        return not bool(overflows.item())

    def _submit(self, owner: Owner, bucket: GradBucket) -> Future[Tensor]:
        """Start to exchange the momenta of a bucket."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.layout is not torch.strided:
            raise TypeError("momenta of sparse gradients are not exchanged")
        gradients = _gradients(bucket, buffer, parameters)
        apart: list[Apart] = []

        def blends(names: Collection[str]) -> Mapping[str, Blend]:
            left = {p: name for p in parameters if (name := self._name(p)) in names}
            found, blended = owner.localize(parameters, gradients, self._scale, left)
            apart.extend(found)
            return {left[p]: blend for p, blend in blended.items()}

        self._momenta.update(zip(parameters, gradients, strict=True))
        key = tuple(map(id, parameters))
        averaging = self.momentum.average(
            buffer, lambda: self._named(parameters), key, self.momentum.step, blends
        )
        beside, joins = self._start_apart(apart) if apart else (None, [])
        if bucket.is_last():
            self.momentum.step += 1
            self.step += 1
            self.momentum.flush()
            self._beside.flush()
        scale = self._scale
        if averaging is None:
            return done(_finished(buffer, joins, scale))
        if beside is None and scale == 1:
            return averaging.future
        ended = [averaging.future, *([] if beside is None else [beside])]

        def finish(all_ended: Future[list[Future[Any]]]) -> Tensor:
            for future in all_ended.value():
                future.value()
            return _finished(buffer, joins, scale)

        return torch.futures.collect_all(ended).then(finish)

    def _start_apart(self, apart: list[Apart]) -> tuple[Future[Tensor] | None, list[_Join]]:
        """Start to average the gradients that travel apart, as one array; return what is to be done with the means."""
        flat = torch.cat([part.gradient for part in apart])
        sizes = [part.gradient.numel() for part in apart]
        means = torch.split(flat, sizes)
        self._apart.update((part.parameter, mean) for part, mean in zip(apart, means, strict=True))
        names = [(self._name(part.parameter), (size,)) for part, size in zip(apart, sizes, strict=True)]
        key = ("apart", *(id(part.parameter) for part in apart), *sizes)
        averaging = self._beside.average(flat, lambda: names, key, self.step)
        joins = [(part.join, mean) for part, mean in zip(apart, means, strict=True)]
        return None if averaging is None else averaging.future, joins

    def taken(self) -> str | None:
        """Return what the last backward pass exchanged, which a step takes now; None if there was none."""
        arrived, self.arrived, self._before = self.arrived, None, None
        return arrived

    def take_back(self) -> None:
        """Forget the last exchange, which no step takes; where a scaler may skip steps, feedback is as before it."""
        before, self._before = self._before, None
        if before is not None and self.arrived is not None:
            self.momentum.load_memory(before)
        self.arrived = None

    def momentum_of(self, parameter: Tensor) -> Tensor | None:
        """Return the new momentum of a parameter to which DDP gives no gradient: no rank has used it."""
        found = self._momenta.get(parameter)
        return None if found is None else found / self._scale

    def apart(self, parameter: Tensor) -> Tensor | None:
        """Return the mean gradients of a parameter's elements that have travelled apart, 1-D and real."""
        return self._apart.get(parameter)


def _gradients(bucket: GradBucket, buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters' parts of a bucket, in their shapes; of complex ones the reals, which DDP's views lack."""
    if not any(parameter.is_complex() for parameter in parameters):
        return bucket.gradients()
    found, start = [], buffer.storage_offset()
    for parameter in parameters:
        reals = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        found.append(buffer.as_strided(reals.shape, reals.stride(), start))
        start += reals.numel()
    return found


def _finished(buffer: Tensor, joins: list[_Join], scale: float) -> Tensor:
    """Complete a bucket that holds the mean of the momenta."""
    with torch.no_grad():
        for join, mean in joins:
            join(mean)
        if scale != 1:
            buffer.mul_(scale)
    return buffer


def _refuse_twice(module: Any, _: Any) -> None:
    """Refuse a second pass that would add a gradient to the momentum of the first."""
    for _hook, state in getattr(module, "_comm_hooks", ()):
        if isinstance(state, MomentumExchange) and state.arrived == "momentum" and module.training:
            held = [p.grad for p in module.parameters() if p.grad is not None]
            if any(bool(grad.any()) for grad in held):
                raise RuntimeError(
                    "the gradients hold the momentum of the last backward pass, which no step() has taken: run all but "
                    "the last of several backward passes under no_sync(), and zero_grad() after a step that is skipped"
                )
