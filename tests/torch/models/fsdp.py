"""Models under FSDP2, their steps, and groups of other backends, for the cases of compressed FSDP2."""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import hybridcomp.torch as hct
from hybridcomp.policy import load_policy

MINUTE = timedelta(seconds=40)
ODD = 61  # rows that no number of ranks divides


def policy_of(text: str):
    """Return a policy from TOML."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return load_policy(file.name)


FEEDBACK = policy_of("""
min_bytes = 1024
exclude = ["*.bias"]
[fsdp]
reduce_scatter = { codec = "int4:block=64", feedback = "ef" }
all_gather = "int8:block=64"
""")


def mesh_of(backend: str, ranks: list[int] | None = None, name: str = "fsdp") -> DeviceMesh:
    """Return a 1-D mesh over a new group; None on ranks that are not in it."""
    ranks = list(range(dist.get_world_size())) if ranks is None else ranks
    options = {"pg_options": hct.Options(policy="none", axis=name)} if backend == "hybridcomp" else {}
    group = dist.new_group(ranks, backend=backend, timeout=MINUTE, **options)
    if dist.get_rank() not in ranks:
        return None
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def net(seed: int = 0, width: int = 48) -> nn.Sequential:
    """Return linear layers of sizes that do not divide evenly, and a norm; the same weights on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(width, ODD), nn.Tanh(), nn.Linear(ODD, width), nn.LayerNorm(width), nn.Linear(width, 7)
    )


def sharded(
    mesh: DeviceMesh, *, reshard: bool = True, mixed: MixedPrecisionPolicy | None = None
) -> nn.Module:
    """Return the model with each linear layer, and the rest, sharded over the mesh."""
    model = net()
    more = {"mp_policy": mixed} if mixed else {}
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **more)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **more)


def batch(step: int = 0, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's inputs and targets of a step."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(12, 48, generator=generator)
    return x, torch.stack([x[:, i : i + 4].sum(1) for i in range(7)], 1)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Return the mean squared error of a rank's batch."""
    x, y = batch(step)
    return ((model(x).float() - y) ** 2).mean()


def train(model: nn.Module, optimizer, steps: range) -> list[float]:
    """Train; return the mean loss of all ranks at each step."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole gradients by name, after one backward pass."""
    model.zero_grad()
    loss_of(model).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def local_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's parts of gradients by name, after one backward pass."""
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.to_local() for name, p in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a sharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters as this rank computes with them."""
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.unshard()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for module in shards:
        module.reshard()
    return found


def same_everywhere(tensors: dict[str, torch.Tensor]) -> None:
    """Assert that all ranks have the same bits."""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        everyone = [torch.empty_like(raw) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, raw)
        assert all(torch.equal(other, everyone[0]) for other in everyone), name


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert that two sets of tensors have the same bits."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), (
            name
        )


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 error."""
    return ((got - expected).norm() / expected.norm()).item()
