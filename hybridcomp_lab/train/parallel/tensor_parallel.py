"""Split linear layers over the tp axis: PyTorch's ``parallelize_module`` with styles that compute on plain
tensors.

The split is after Shoeybi et al. 2019 (Megatron-LM). PyTorch's own ``ColwiseParallel`` and ``RowwiseParallel`` split in
the same way and send the same messages, but run every operation through DTensor's dispatch: about 1 ms of
Python per layer and micro-batch on a CPU, a fifth of the step of a small model. Parameters that are plain
tensors also suit DistributedDataParallel and the optimizer as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from hybridcomp_lab.train.model.autoencoder import Autoencoder
from hybridcomp_lab.train.model.experts import Mixture
from hybridcomp_lab.train.model.gpt import GPT
from hybridcomp_lab.train.parallel.sequence_parallel import gather, sum_to_parts

Carry = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()  # the layer's own product: nothing else holds it
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``; in backward sum the parts of its gradient that the ranks computed over the group."""
    return _SumGradient.apply(x, group)  # type: ignore[no-any-return]


def sum_output(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over the group, in place; its gradient is the same on all ranks and passes as it is."""
    return _SumOutput.apply(x, group)  # type: ignore[no-any-return]


class ColumnParallel(ParallelStyle):
    """Linear layer that computes this rank's part of the outputs from the whole input.

    Args:
        enter: function that makes the whole input from this rank's.
    """

    def __init__(self, enter: Carry = sum_gradient) -> None:
        super().__init__()
        self._enter = enter

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        _keep_part(module, 0, device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (self._enter(inputs[0], group),))
        return module


class RowParallel(ParallelStyle):
    """Linear layer that takes this rank's part of the inputs; the outputs are summed.

    Args:
        leave: function that turns the layer's outputs into this rank's result.
    """

    def __init__(self, leave: Carry = sum_output) -> None:
        super().__init__()
        self._leave = leave

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        _keep_part(module, 1, device_mesh)
        module.register_forward_hook(lambda _, inputs, output: self._leave(output, group))
        return module


class SumCodes(ParallelStyle):
    """Encoder of each rank's share of a layer's outputs; the codes are summed, in the place of the outputs.

    Args:
        leave: function that turns the codes into this rank's result.
    """

    def __init__(self, leave: Carry) -> None:
        super().__init__()
        self._leave = leave

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        module.register_forward_hook(lambda _, inputs, output: self._leave(output, group))
        return module


def _keep(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``: this rank's part of a sum."""
    return x


def _keep_part(module: nn.Module, dim: int, mesh: DeviceMesh) -> None:
    """Keep this rank's part of a weight, which every rank has built whole, so that nothing needs to be sent."""
    weight = module.get_parameter("weight")
    part = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    module.register_parameter("weight", nn.Parameter(part.clone()))


_BLOCK_PLAN: dict[str, ParallelStyle] = {
    "attn.qkv": ColumnParallel(),
    "attn.out": RowParallel(),
    "mlp.up": ColumnParallel(),
    "mlp.down": RowParallel(),
}
_SEQUENCE_PLAN: dict[str, ParallelStyle] = {
    path: ColumnParallel(gather) if isinstance(style, ColumnParallel) else RowParallel(sum_to_parts)
    for path, style in _BLOCK_PLAN.items()
}


def split_over_tp(model: GPT, mesh: DeviceMesh, *, sequence: bool) -> frozenset[str]:
    """Split the blocks' matrices over the ranks of the one-dimensional ``mesh``.

    Args:
        model: stage of the model.
        mesh: mesh of tp.
        sequence: whether each rank has a part of the sequences between the layers.

    Returns:
        The names of the parameters that are split now; the others are the same on all ranks of the mesh.
    """
    split = set()
    for index, block in model.blocks.items():
        whole = "mlp." if isinstance(block.mlp, Mixture) else "-"  # all ranks of the mesh compute a mixture
        styles = _SEQUENCE_PLAN if sequence else _BLOCK_PLAN
        plan = {path: style for path, style in styles.items() if not path.startswith(whole)}
        split |= {f"blocks.{index}.{path}.weight" for path in plan}
        parallelize_module(block, mesh, _with_codes(block, plan, sequence=sequence))
    return frozenset(split)


def _with_codes(
    block: nn.Module, plan: dict[str, ParallelStyle], *, sequence: bool
) -> dict[str, ParallelStyle]:
    """Return a block's plan with sums of codes in the place of the sums that have an autoencoder."""
    found = dict(plan)
    leave = sum_to_parts if sequence else sum_output
    for path, code in block.named_modules():
        if isinstance(code, Autoencoder):
            into = next(p for p in plan if p in (path.replace(".code", end) for end in (".out", ".down")))
            found |= {into: RowParallel(_keep), f"{path}.encode": SumCodes(leave)}
    return found


def partial_codes(model: GPT, *, sequence: bool) -> frozenset[str]:
    """Return the names of autoencoders' parameters of whose gradient each rank of tp has a part."""
    partial = ("encode", "decode") if sequence else ("encode",)  # else ranks have the sum, and its gradient
    return frozenset(
        f"{path}.{part}.weight"
        for path, code in model.named_modules()
        if isinstance(code, Autoencoder)
        for part in partial
    )


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of parameter ``name`` that the ranks of a tp axis hold, in their order."""
    style = next((style for path, style in _BLOCK_PLAN.items() if name.endswith(f".{path}.weight")), None)
    if style is None:
        return parts[0]
    return torch.cat(list(parts), dim=0 if isinstance(style, ColumnParallel) else 1)


def part_shape(name: str, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape of the part of parameter ``name`` that each of the ranks of a tp axis holds."""
    style = next((style for path, style in _BLOCK_PLAN.items() if name.endswith(f".{path}.weight")), None)
    if style is None:
        return tuple(shape)
    rows, columns = shape
    return (rows // ranks, columns) if isinstance(style, ColumnParallel) else (rows, columns // ranks)
