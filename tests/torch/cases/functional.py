"""Functional collectives, which DTensor and compiled programs use, and coalesced ones; policy none."""

import operator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.torch.cases.collectives import data, fold, rank, size


def done(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Wait for both; return the second."""
    return [t.clone() for t in tensors][1]


def case_functional_collectives() -> None:
    n, me = size(), rank()
    world = dist.group.WORLD
    assert torch.equal(funcol.all_reduce(data(me), "sum", world).clone(), fold(operator.add))
    gathered = funcol.all_gather_tensor(data(me), 0, world).clone()
    assert torch.equal(gathered, torch.cat([data(r) for r in range(n)]))
    scattered = funcol.reduce_scatter_tensor(data(me, 4 * n), "avg", 0, world).clone()
    assert torch.allclose(scattered, fold(operator.add, 4 * n).view(n, 4)[me] / n)
    swapped = funcol.all_to_all_single(torch.arange(float(n)) + 10 * me, None, None, world).clone()
    assert swapped.tolist() == [10.0 * r + me for r in range(n)]
    assert torch.equal(funcol.broadcast(data(me), n - 1, world).clone(), data(n - 1))
    two = funcol.all_reduce_coalesced([data(me), data(me, 9)], "sum", world)
    assert torch.equal(done(two), fold(operator.add, 9))
    two = funcol.all_gather_into_tensor_coalesced([data(me), data(me, 9)], world)
    assert torch.equal(done(two), torch.cat([data(r, 9) for r in range(n)]))
    two = funcol.reduce_scatter_tensor_coalesced([data(me, n), data(me, 2 * n)], "sum", [0, 0], world)
    assert torch.equal(done(two), fold(operator.add, 2 * n).view(n, 2)[me])


def case_coalescing_manager() -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [data(rank(), n) for n in (3, 5)]
    with _coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert all(torch.equal(t, fold(operator.add, t.numel())) for t in tensors)
    outs = [torch.empty(n * size()) for n in (3, 5)]
    with _coalescing_manager():
        for out, n in zip(outs, (3, 5), strict=True):
            dist.all_gather_into_tensor(out, data(rank(), n))
    assert all(torch.equal(o[-n:], data(size() - 1, n)) for o, n in zip(outs, (3, 5), strict=True))
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(tensors[0], 0, async_op=True)
        dist.broadcast(tensors[1], 0, async_op=True)
    manager.wait()


def case_compiled_programs() -> None:
    group = dist.group.WORLD

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y + 1, 0, group)
        dist.all_reduce(z)  # the compiler makes this functional
        return funcol.reduce_scatter_tensor(z, "avg", 0, group)

    x = torch.full((4,), float(rank() + 1))
    assert torch.equal(step(x), torch.full((4,), size() * (2.0 * sum(range(1, size() + 1)) + 1)))
