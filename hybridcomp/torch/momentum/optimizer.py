"""Step by momenta that the ranks have exchanged: what 1-bit Adam and its family have in common.

A step either takes mean gradients, as Adam does, and renews momentum and variance; or it takes the new momentum, which
:mod:`.exchange` has made of all ranks' local ones, and leaves the variance as it is. Which of the two is known before
the backward pass, and the same on all ranks.

Elements that have had next to no gradient when the variance is last renewed would be moved out of all proportion by a
message of signs. They go on by their mean gradients, as in Adam, for good: :meth:`MomentumOptimizer._keep_renewing`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.codecs import Codec
from hybridcomp.policy import Policy, load_policy
from hybridcomp.torch.hook import comm_hook
from hybridcomp.torch.hook.averager import Blend
from hybridcomp.torch.momentum.exchange import Apart, MomentumExchange

Tensor = torch.Tensor
Group = dict[str, Any]
PolicyLike = str | os.PathLike[str] | Policy | Codec

SIGN = "sign:block=65536:min_bytes=256"
"""Signs with one scale for a parameter, or for a rank's share of it, up to that size. Biases and norms go by signs,
too: at 4 bytes a value they would be a fifth of all bytes of a small GPT."""

FLOOR = 1e-6
"""Share of a parameter's mean variance below which an element counts as one that has none. Its root mean square is a
thousandth of the others', and the messages' scale, a part of theirs, would move it by hundreds of learning rates."""

_FEEDBACK = "ef"


class MomentumOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer whose ranks exchange their momentum. It steps nothing before :meth:`register`.

    In a parameter's state ``exp_avg`` is the momentum, ``exp_avg_sq`` the variance, ``step`` the number of the
    parameter's steps, ``renewals`` of those that renewed its variance, and ``renews``, where there are any, tells the
    elements whose variance is still renewed, 1 for these and 0 for others, in the parameter's shape (a complex one's
    with a trailing 2). A group's ``steps`` counts all steps.
    """

    counted: ClassVar[frozenset[str]] = frozenset({"steps"})
    """Keys of groups whose values change as the optimizer steps; the others are options."""

    _step_supports_amp_scaling = True  # a GradScaler leaves it to step() to skip what has overflowed

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, codec: PolicyLike, warmup: PolicyLike
    ) -> None:
        """Check what all optimizers of the family take.

        Args:
            params: parameters or groups, as of every optimizer of torch's.
            defaults: options of groups: ``lr``, ``betas``, ``eps``, ``weight_decay`` and others.
            codec: codec or policy of momenta.
            warmup: codec or policy of gradients.

        Raises:
            ValueError: an option is out of its range; says its name, and what is allowed.
            PolicyError: a codec or policy cannot be read.
        """
        self._exchange: MomentumExchange | None = None
        self._groups: dict[Tensor, Group] = {}
        self._policies = (load_policy(warmup), policy_of_momenta(codec))
        self._ran = _Ran(type(self).__name__)
        super().__init__(params, {**defaults, "steps": 0})
        weakref.finalize(self, _tell_unused, self._ran)

    # -- what differs between the optimizers --------------------------------------------------------

    @property
    @abc.abstractmethod
    def exchanges_momentum(self) -> bool:
        """Tell whether the next step takes momenta, not gradients."""

    @property
    def steps_alone(self) -> bool:
        """Tell whether the next step takes this rank's own gradients, and nothing is exchanged."""
        return False

    @abc.abstractmethod
    def _move(self, moving: Sequence[tuple[Group, Tensor]]) -> None:
        """Move parameters, each with its group, by momentum and variance of their states."""

    @abc.abstractmethod
    def _stepped(self) -> None:
        """Decide what the next step takes, after each step; alike on all ranks."""

    def _settings(self) -> dict[str, Any]:
        """Return all that must be the same on all ranks, by the names of arguments."""
        policies = {"warmup": self._policies[0].canonical(), "codec": self._policies[1].canonical()}
        groups = [
            {k: v if not isinstance(v, Tensor) else v.item() for k, v in group.items() if k != "params"}
            for group in self.param_groups
        ]
        return {"type": type(self).__name__, **policies, "param_groups": groups}

    # -- registration --------------------------------------------------------------------------------

    def register(self, module: DistributedDataParallel, *, scaler: Any = None, axis: str = "dp") -> None:
        """Have a DDP module's backward passes exchange what this optimizer steps by. Collective over its ranks.

        It registers the module's communication hook; :meth:`attach` does all but that.

        Args:
            module: module whose parameters are those of this optimizer.
            scaler: the ``torch.amp.GradScaler`` that scales the loss, if there is one. Error feedback is then copied
                before each exchange of momenta: a step that the scaler skips leaves it as it was.
            axis: section of the policies, where ``codec`` or ``warmup`` are policies with sections.

        Raises:
            TypeError: the module is not DDP's; says what to use instead.
            ValueError: the module has a communication hook, or unlike parameters; the optimizer is registered; or
                the ranks' settings differ.
        """
        name = type(self).__name__
        hooked = isinstance(module, DistributedDataParallel) and getattr(module, "_comm_hooks", None)
        if hooked and self._exchange is None:
            raise ValueError(
                f"module: it has a communication hook already, and {name} registers its own: leave out "
                "register_comm_hook"
            )
        exchange = self.attach(module, scaler=scaler, axis=axis)
        module.register_comm_hook(exchange, comm_hook)

    def attach(
        self,
        module: DistributedDataParallel,
        *,
        scaler: Any = None,
        axis: str = "dp",
        stage: int | None = None,
    ) -> MomentumExchange:
        """Return the state with which the module's hook must call ``hct.comm_hook``. Collective over its ranks.

        Args:
            module, scaler, axis: see :meth:`register`.
            stage: pipeline stage that the module is; for a policy's ``stages``.

        Raises:
            TypeError, ValueError: see :meth:`register`.
        """
        name = type(self).__name__
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"{name}.register takes a DistributedDataParallel module, not {_described(module)}"
            )
        if self._exchange is not None:
            raise ValueError(f"module: this {name} is registered already; make one for each DDP module")
        self._check_parameters(module)
        self._check_alike(module.process_group)
        self._exchange = MomentumExchange(self, module, self._policies, axis, scaler, stage)
        self._ran.tells = dist.get_rank(module.process_group) == 0
        return self._exchange

    def _check_parameters(self, module: DistributedDataParallel) -> None:
        theirs = {p: name.removeprefix("module.") for name, p in module.named_parameters() if p.requires_grad}
        mine = set(self._trained())
        ignored: set[str] = getattr(module, "parameters_to_ignore", set())
        lacking = [name for p, name in theirs.items() if p not in mine and name not in ignored]
        other = type(self).__name__
        if lacking:
            raise ValueError(
                f"params: {other} must have all parameters that the module trains, and lacks {_some(lacking)}; "
                "ZeroRedundancyOptimizer, which hands out shares of them, takes torch.optim.AdamW"
            )
        foreign = [f"one {list(p.shape)}" for p in mine if p not in theirs]
        if foreign:
            raise ValueError(
                f"params: {other} has parameters that the module does not train: {_some(foreign)}"
            )

    def _check_alike(self, process_group: Any) -> None:
        mine = self._settings()
        told: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(told, mine, group=process_group)
        for rank, settings in enumerate(told):
            for key, value in told[0].items():
                if settings.get(key) != value:
                    found = _difference(key, value, settings.get(key))
                    raise ValueError(f"{found} on rank {rank}: all ranks must have the same settings")

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, before :meth:`register`; see :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: the optimizer is registered, a parameter is FSDP2's, or an option is out of its range.
        """
        if self._exchange is not None:
            raise ValueError(
                "param_group: parameters cannot be added once the optimizer is registered, as DDP's buckets are made: "
                "add them before DistributedDataParallel and register()"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_group(group)
        for parameter in group["params"]:
            if hasattr(parameter, "_local_tensor") or hasattr(parameter, "_is_flat_param"):
                self.param_groups.pop()
                raise ValueError(f"params: {type(self).__name__} takes whole parameters, not {_FSDP}")

    # -- the exchange --------------------------------------------------------------------------------

    @torch.no_grad()
    def localize(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        scale: float,
        blended: Collection[Tensor],
    ) -> tuple[list[Apart], dict[Tensor, Blend]]:
        """Turn gradients into the local momenta, in place: see :meth:`.exchange.Owner.localize`."""
        apart: list[Apart] = []
        left: dict[Tensor, Blend] = {}
        for parameter, values in zip(parameters, gradients, strict=True):
            group, state = self._group_of(parameter), self.state_of(parameter)
            if scale != 1:
                values.div_(scale)
            if coupled(group):
                values.add_(real(parameter), alpha=group["weight_decay"])
            renews, momentum, beta = state.get("renews"), real(state["exp_avg"]), group["betas"][0]
            same = momentum.dtype == values.dtype and momentum.stride() == values.stride()
            if parameter in blended and renews is None and same:
                start = momentum.storage_offset()
                left[parameter] = Blend(momentum.as_strided((values.numel(),), (1,), start), beta)
                continue
            taken = None if renews is None else values[renews]
            values.mul_(1 - beta).add_(momentum * beta)  # the bits of the kernels that blend them
            if taken is not None:
                values[renews] = 0
                apart.append(Apart(parameter, taken, partial(_join, state, values, 1 - beta)))
        return apart, left

    def _group_of(self, parameter: Tensor) -> Group:
        if not self._groups:
            self._groups = {p: group for group in self.param_groups for p in group["params"]}
        return self._groups[parameter]

    # -- steps ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take what the last backward pass has exchanged, and move the parameters.

        Args:
            closure: function that computes loss and gradients again, and returns the loss.

        Returns:
            The closure's loss.

        Raises:
            RuntimeError: the optimizer is not registered with a DDP module, a gradient is sparse, a loss was scaled
                by a scaler that :meth:`register` does not know, or nothing was exchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange = self._registered()
        if self._overflowed(exchange):
            exchange.take_back()
            return loss
        taken = exchange.taken()
        if taken is None:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise RuntimeError(
                    f"{type(self).__name__}.step(): no backward pass of the DDP module has exchanged gradients since "
                    "the last step; the last of those under no_sync() must be outside of it"
                )
            return loss
        self._advance(exchange, taken)
        for group in self.param_groups:
            group["steps"] += 1
        self._stepped()
        self._ran.steps = self.steps
        self._ran.compressed = self._ran.compressed or taken == "momentum"
        return loss

    def _advance(self, exchange: MomentumExchange, taken: str) -> None:
        """Renew momenta and variances by what was exchanged, and move the parameters."""
        renew, moving = taken == "gradient", list[tuple[Group, Tensor]]()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            moving += [(group, p) for p in trained if self._take(exchange, group, p, renew=renew)]
        self._move(moving)

    @property
    def steps(self) -> int:
        """Return the number of steps taken."""
        return int(self.param_groups[0]["steps"])

    def _registered(self) -> MomentumExchange:
        if self._exchange is None:
            raise RuntimeError(
                f"{type(self).__name__} steps by what a DDP module's hook exchanges, and is not registered with one: "
                "call optimizer.register(ddp_model) after DistributedDataParallel(...), and before the first backward "
                "pass"
            )
        return self._exchange

    def _overflowed(self, exchange: MomentumExchange) -> bool:
        """Tell whether a scaler skips this step; unscale the gradients if it does not."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        if exchange.scaler is None:
            raise RuntimeError(
                f"scaler: the loss is scaled, which the exchange of momenta must know: {type(self).__name__}."
                "register(ddp_model, scaler=scaler)"
            )
        scale = getattr(self, "grad_scale", None)
        if found.item():
            return True
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        return False

    def _take(self, exchange: MomentumExchange, group: Group, parameter: Tensor, *, renew: bool) -> bool:
        """Take a parameter's gradient, or its new momentum; tell whether there is one."""
        given = parameter.grad
        if given is None and not renew:
            given = exchange.momentum_of(parameter)
        if given is None:
            return False
        if given.layout is not torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not take sparse gradients; torch.optim.SparseAdam does"
            )
        state = self.state_of(parameter)
        momentum, variance, beta = state["exp_avg"], real(state["exp_avg_sq"]), group["betas"][1]
        state["step"] += 1
        if renew:
            if coupled(group):
                given = given.add(parameter, alpha=group["weight_decay"])
            momentum.lerp_(given, 1 - group["betas"][0])
            variance.mul_(beta).addcmul_(real(given), real(given), value=1 - beta)
            state["renewals"] += 1
        else:
            self._follow(group, state, real(given))
            real(momentum).copy_(real(given))
            apart = exchange.apart(parameter)
            if apart is not None:
                renews = state["renews"]
                variance[renews] = variance[renews].mul_(beta).addcmul_(apart, apart, value=1 - beta)
        return True

    def _follow(self, group: Group, state: dict[str, Any], momentum: Tensor) -> None:
        """Take notice of a parameter's new momentum, before it replaces the one in its state."""

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return what is kept of a parameter, which is made where there is none yet."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["renewals"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _from_rank_0(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's numbers on all ranks, which may have summed in another order; collective."""
        group = self._registered().process_group
        if dist.get_world_size(group) == 1:
            return list(values)
        device = self.param_groups[0]["params"][0].device
        bits = torch.tensor(values, dtype=torch.float64).view(torch.int64).to(device)
        dist.broadcast(bits, dist.get_global_rank(group, 0), group=group)
        found: list[float] = bits.cpu().view(torch.float64).tolist()
        return found

    def _trained(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def _keep_renewing(self) -> None:
        """Mark the elements whose variance is next to nothing, as the variance of all others stops; collective.

        They are those below :data:`FLOOR` of their parameter's mean, and all of a parameter that has none.
        """
        parameters = self._trained()
        means = [
            float(real(self.state_of(p)["exp_avg_sq"]).double().mean()) if p.numel() else 0.0
            for p in parameters
        ]
        for parameter, mean in zip(parameters, self._from_rank_0(means), strict=True):
            state = self.state[parameter]
            renews = real(state["exp_avg_sq"]).double() <= FLOOR * mean
            state.pop("renews", None)
            if renews.any():
                state["renews"] = renews

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; training goes on with the same bits once :func:`hct.load_state_dict` has
        loaded what error feedback remembers.

        Args:
            state_dict: state of an optimizer of this class, or of ``torch.optim.Adam`` or ``AdamW``, from whose
                momentum and variance the warm-up goes on.
        """
        super().load_state_dict(state_dict)
        self._groups = {}
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        for state in self.state.values():
            if "renews" in state:
                state["renews"] = state["renews"].bool()
            if "renewals" not in state and "step" in state:
                state["renewals"] = torch.as_tensor(state["step"], dtype=torch.float32).clone().cpu()


class AdamFamily(MomentumOptimizer):
    """Optimizers that move a parameter as Adam does: by its momentum over its deviation, the root of the variance."""

    def _move(self, moving: Sequence[tuple[Group, Tensor]]) -> None:
        for group, parameter in moving:
            state, values, rate = self.state[parameter], real(parameter), float(group["lr"])
            if group["weight_decay"] and group["decoupled_weight_decay"]:
                values.mul_(1 - rate * group["weight_decay"])
            first, deviation = self._corrected(group, state)
            values.addcdiv_(real(state["exp_avg"]), deviation, value=-rate / first)

    @staticmethod
    def _corrected(group: Group, state: dict[str, Any]) -> tuple[float, Tensor]:
        """Return the divisor of a parameter's momentum, and its deviation with ``eps``, real."""
        variance, (beta1, beta2) = real(state["exp_avg_sq"]), group["betas"]
        corrected = group["bias_correction"]
        taken, renewals = int(state["step"]), int(state["renewals"])
        first = 1 - beta1**taken if corrected else 1.0
        second = 1 - beta2**renewals if corrected and renewals else 1.0
        deviation = variance.sqrt().div_(math.sqrt(second))
        renews = state.get("renews")
        if renews is not None:
            own = 1 - beta2**taken if corrected else 1.0
            deviation[renews] = variance[renews].sqrt_().div_(math.sqrt(own))
        return first, deviation.add_(group["eps"])


class _Ran:
    """Keep what the warning at an optimizer's end says, once it is gone."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.compressed, self.why, self.tells = name, 0, False, "", False


def _tell_unused(ran: _Ran) -> None:
    if ran.tells and ran.steps and not ran.compressed:
        warnings.warn(
            f"{ran.name} took {ran.steps} steps, and all were of the warm-up: no momentum was compressed{ran.why}",
            stacklevel=1,
        )


def policy_of_momenta(codec: PolicyLike) -> Policy:
    """Return the policy of momenta: a bare codec gets error feedback."""
    if codec == "sign":
        codec = SIGN
    policy = load_policy(codec)
    rule = policy.base
    if rule.codecs is None or rule.feedback is not None or all(c.name == "none" for c in rule.codecs):
        return policy
    return dataclasses.replace(policy, base=dataclasses.replace(rule, feedback=_FEEDBACK))


def real(tensor: Tensor) -> Tensor:
    """Return a tensor, or a complex one's memory as reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def coupled(group: Group) -> bool:
    """Tell whether weight decay is a part of the gradient."""
    return bool(group["weight_decay"]) and not group["decoupled_weight_decay"]


def _join(state: dict[str, Any], momentum: Tensor, share: float, mean: Tensor) -> None:
    """Put the new momenta of elements whose gradients travelled apart into the momentum of all."""
    renews = state["renews"]
    momentum[renews] = real(state["exp_avg"])[renews].lerp_(mean, share)


def _check_group(group: Group) -> None:
    """Check the options that all optimizers have."""
    betas = group["betas"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas!r}")
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(f"{name} must be finite and not negative, not {group[name]!r}")


_FSDP = (
    "FSDP's shares of them: use torch.optim.AdamW and hybridcomp.torch.compress_fsdp(model, policy=...), which "
    "compresses gradients where they are scattered"
)


def _described(module: Any) -> str:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        return f"{type(module).__name__}, which has {_FSDP}"
    if isinstance(module, torch.nn.Module):
        return f"{type(module).__name__}: wrap it, and register what DistributedDataParallel(module) returns"
    return repr(module)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _difference(key: str, first: Any, other: Any) -> str:
    """Say which setting differs."""
    if key == "param_groups" and isinstance(other, list):
        if len(first) != len(other):
            return f"params: {len(first)} groups on rank 0 and {len(other)}"
        for mine, theirs in zip(first, other, strict=True):
            for name in mine:
                if mine[name] != theirs.get(name):
                    return f"{name} is {mine[name]!r} on rank 0 and {theirs.get(name)!r}"
    return f"{key} is {first!r} on rank 0 and {other!r}"


__all__ = ["FLOOR", "SIGN", "AdamFamily", "Group", "MomentumOptimizer", "PolicyLike", "coupled", "real"]
