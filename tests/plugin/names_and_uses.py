"""Print on each rank what a program may ask of its groups, and uses in which torch looks at a backend's name.

It must see the same on gloo and with ``HYBRIDCOMP_REPLACE=gloo``.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def say(*what: object) -> None:
    os.write(1, f"{dist.get_rank()}: {what}\n".encode())


def names(what: str, group: dist.ProcessGroup) -> None:
    backend = dist.get_backend(group)
    config = dist.get_backend_config(group)
    asked = group.name(), group._get_backend_name(), group._get_backend(torch.device("cpu")).name()
    same = backend == "gloo", backend is dist.Backend.GLOO, backend in ("nccl", "gloo"), backend in {"gloo"}
    say(what, backend, type(backend), config, *asked, *same, group.group_desc, group.size())


def digest(module: nn.Module) -> list[float]:
    return [round(float(p.detach().double().sum()), 5) for p in module.parameters()]


def uses() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    given = [f"from {rank}"]
    dist.broadcast_object_list(given)
    mine = [None]
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None)
    say("objects", objects, given, mine)

    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    x, y = torch.full((4,), float(rank)), torch.empty(4)
    sends = [
        dist.P2POp(dist.isend, x, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, y, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    say("neighbour", y.tolist())

    z = torch.full((2,), 1.0 + rank, requires_grad=True)
    outs = [torch.empty(1) for _ in range(ranks)]
    with_gradients.all_to_all(outs, list(z.split(1)))
    total = with_gradients.all_reduce(z * 2).sum() + torch.cat(with_gradients.all_gather(z)).sum()
    total.backward()
    say("gradients", z.grad.tolist(), total.item())

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with torch.profiler.profile():
        ddp(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
        optimizer.step()
    say("DDP", digest(ddp), ddp._get_ddp_logging_data()["world_size"])

    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(nn.Linear(4, 8), device_id=torch.device("cpu"))
    sharded(torch.ones(2, 4)).sum().backward()
    say("FSDP", digest(sharded))


def main() -> None:
    warnings.simplefilter("ignore")
    say_backends = dist.is_gloo_available(), dist.is_backend_available("gloo"), dist.is_mpi_available()
    dist.init_process_group("gloo")
    say("available", *say_backends, dist.get_default_backend_for_device("cpu"))
    names("default", dist.group.WORLD)
    names("new", dist.new_group())
    names("named", dist.new_group(backend="GLOO"))
    names("with options", dist.new_group(timeout=timedelta(seconds=20), group_desc="some"))
    names("two", dist.new_subgroups(2)[0])
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    names("dp", mesh["dp"].get_group())
    names("tp", mesh["tp"].get_group())
    say([known["backend_config"] for known in dist.distributed_c10d._world.pg_config_info])
    uses()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
