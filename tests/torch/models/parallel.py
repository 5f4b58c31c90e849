"""Data, tensor, pipeline and fully sharded parallelism on four ranks; the gradients that each ends with."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.torch.models.ddp import batch, loss_of, model, reference_gradients, relative_error

RANKS = 4


def _rows(index: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch()
    return x.chunk(of)[index], y.chunk(of)[index]


def ddp(mesh_name: str = "dp", **kwargs) -> DistributedDataParallel:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(mesh_name,))
    return DistributedDataParallel(model(), process_group=mesh.get_group(), **kwargs)


def ddp_gradients(wrapped: DistributedDataParallel) -> dict[str, torch.Tensor]:
    x, y = _rows(dist.get_rank(), RANKS)
    wrapped.zero_grad()
    loss_of(wrapped(x), y).backward()
    return {name: p.grad.clone() for name, p in wrapped.module.named_parameters()}


def fsdp_gradients(mesh_name: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=(mesh_name,))
    net = model()
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    x, y = _rows(dist.get_rank(), RANKS)
    loss_of(net(x), y).backward()
    return {name: p.grad.full_tensor() for name, p in net.named_parameters()}


def tensor_parallel(net: nn.Module, mesh) -> nn.Module:
    plan = {}
    for name, _ in net.named_children():
        plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def tp_gradients() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    net = tensor_parallel(model(), mesh)
    x, y = batch()
    loss_of(net(x), y).backward()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in net.named_parameters()
    }


def pipeline_gradients() -> dict[str, torch.Tensor]:
    """Return the gradients of this rank's own stage, by 1F1B over four stages and four micro-batches."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    rank = dist.get_rank()
    net = model()[rank]
    stage = PipelineStage(net, rank, RANKS, torch.device("cpu"), group=mesh.get_group())
    schedule = Schedule1F1B(stage, RANKS, loss_fn=loss_of)
    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            schedule.step(x)
        elif rank == RANKS - 1:
            schedule.step(target=y)
        else:
            schedule.step()
    return {f"{rank}.{name}": p.grad for name, p in net.named_parameters()}


def three_dimensional_gradients() -> dict[str, torch.Tensor]:
    """Return the gradients by FSDP2 over dp=2 of modules that are tensor-parallel over tp=2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = tensor_parallel(model(), mesh["tp"])
    for block in net:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    x, y = _rows(mesh["dp"].get_local_rank(), 2)
    loss_of(net(x), y).backward()
    return {name: p.grad.full_tensor() for name, p in net.named_parameters()}


def assert_same_on_all_ranks(gradients: dict[str, torch.Tensor]) -> None:
    """Assert that replicas have the same bits."""
    for name, grad in gradients.items():
        everyone = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, grad.contiguous())
        for other in everyone:
            assert torch.equal(other.view(torch.int32), everyone[0].view(torch.int32)), name


def assert_errors_within(
    gradients: dict[str, torch.Tensor], least: float, most: float, rows: int = 16
) -> None:
    """Assert that matrices were compressed (their error is at least ``least``), and are near all the same."""
    expected = reference_gradients(rows)
    for name, grad in gradients.items():
        if grad.dim() == 2:
            error = relative_error(grad, expected[name])
            assert least < error < most, (name, error)
