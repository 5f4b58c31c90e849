"""Ordinary uses of the backend, each of which found no fault when it was tried: it stays so."""

import gc
import os
import socket
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.rpc as rpc
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from tests.calls import python_calls
from tests.torch.models.ddp import batch, loss_of, model
from tests.torch.models.parallel import assert_same_on_all_ranks


def mine() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def shares() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the ranks' parts of a batch."""
    x, y = batch(60)
    size = dist.get_world_size()
    return list(zip(x.chunk(size), y.chunk(size), strict=True))


def case_what_python_does_for_a_call_stays_little() -> None:
    """An all-reduce that the caller waits for, one that it starts, and the backward pass of DDP with the hook."""
    hct.set_policy("int8")
    group = dist.new_group(backend="hybridcomp")
    hct.set_policy("hybrid")
    tensor = torch.ones(1024)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), process_group=group
    )
    ddp.register_comm_hook(hct.HookState("int8", module=ddp), hct.comm_hook)
    ahead: list[torch.Tensor] = []

    def meet() -> None:
        ahead[:] = [ddp(torch.ones(4, 300)).sum()]
        MPI.COMM_WORLD.Barrier()

    def backward() -> None:
        ahead[0].backward()

    for most, run in (
        (12, lambda: dist.all_reduce(tensor, group=group)),
        (25, lambda: dist.all_reduce(tensor, group=group, async_op=True).wait()),
        (200, backward),  # of four parameters in one bucket
    ):
        for _ in range(4):
            meet()
            run()
        calls = python_calls(run, meet, ours=True)
        assert calls <= most, f"{calls} for {most}"


def case_ranks_within_a_group() -> None:
    """Roots and peers by ``group_src`` and ``group_dst``, in a group whose ranks are others than the world's."""
    rank, size = mine()
    group = dist.new_group([size - 1, 0], use_local_synchronization=False)
    if rank in (0, size - 1):
        place = dist.get_rank(group)
        x = torch.full((5,), float(rank))
        dist.broadcast(x, group=group, group_src=1)
        assert x.tolist() == [float(dist.get_global_rank(group, 1))] * 5
        parts = [torch.full((2,), 7.0 + i) for i in range(2)] if place == 1 else None
        out = torch.empty(2)
        dist.scatter(out, parts, group=group, group_src=1)
        assert out.tolist() == [7.0 + place] * 2
        total = torch.ones(3)
        dist.reduce(total, group=group, group_dst=1)
        assert place == 0 or total.tolist() == [2.0] * 3
        if place == 0:
            dist.send(torch.arange(4.0), group=group, group_dst=1)
        else:
            dist.recv(got := torch.empty(4), group=group, group_src=0)
            assert got.tolist() == [0.0, 1.0, 2.0, 3.0]
        given = [f"from {rank}"]
        dist.broadcast_object_list(given, group=group, group_src=1)
        assert given == [f"from {dist.get_global_rank(group, 1)}"]
    dist.barrier()


def case_uneven_and_empty_all_to_all() -> None:
    rank, size = mine()
    for least in (0, 1):
        counts = [
            [(sender + 2 * receiver) % 3 * (1 - least) + least * sender for receiver in range(size)]
            for sender in range(size)
        ]
        send = torch.cat([torch.full((counts[rank][to], 3), 10.0 * rank + to) for to in range(size)])
        outs = [counts[sender][rank] for sender in range(size)]
        got = torch.full((sum(outs), 3), -1.0)
        dist.all_to_all_single(got, send, outs, counts[rank])
        want = torch.cat([torch.full((outs[sender], 3), 10.0 * sender + rank) for sender in range(size)])
        assert torch.equal(got, want)
        listed = [torch.full((n, 3), -1.0) for n in outs]
        dist.all_to_all(listed, list(send.split(counts[rank])))
        assert torch.equal(torch.cat(listed), want)
    nothing = torch.empty(0, 4)
    dist.all_to_all_single(torch.empty(0, 4), nothing, [0] * size, [0] * size)


def case_objects_of_a_hundred_megabytes() -> None:
    rank, size = mine()
    large = bytes([rank]) * 101_000_000
    given = [large if rank == 1 else None, rank]
    dist.broadcast_object_list(given, src=1)
    assert given[1] == 1
    assert len(given[0]) == 101_000_000
    assert given[0][:1] == given[0][-1:] == b"\1"
    del given, large
    gathered = [None] * size
    dist.all_gather_object(gathered, {rank: "x" * (rank * 1_000_000)})
    assert [len(found[place]) for place, found in enumerate(gathered)] == [i * 1_000_000 for i in range(size)]


def case_a_checkpoint_is_written_while_training_goes_on() -> None:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    beside = dist.new_group()  # async_save has collectives of its own, in a thread

    def step() -> None:
        optimizer.zero_grad()
        x, y = shares()[dist.get_rank()]
        loss_of(ddp(x), y).backward()
        optimizer.step()

    step()
    saved = {name: p.detach().clone() for name, p in ddp.module.state_dict().items()}
    future = dcp.async_save({"model": ddp.module.state_dict()}, checkpoint_id=folder[0], process_group=beside)
    for _ in range(20):
        step()
    future.result()
    loaded = {name: torch.zeros_like(p) for name, p in saved.items()}
    dcp.load({"model": loaded}, checkpoint_id=folder[0], process_group=beside)
    for name, p in saved.items():
        assert torch.equal(loaded[name], p), name
        assert not torch.equal(ddp.module.state_dict()[name], p), name
    assert_same_on_all_ranks(dict(ddp.module.named_parameters()))


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.full((4,), float(place))


def case_workers_of_a_data_loader() -> None:
    """They are forked while the group is there, and end; what they read is reduced between."""
    sampler = torch.utils.data.DistributedSampler(_Rows(), shuffle=False)
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=2, sampler=sampler, num_workers=2)
    for _ in range(2):
        total = torch.zeros(4)
        for rows in loader:
            part = rows.sum(0)
            dist.all_reduce(part)
            total += part
        assert total.tolist() == [float(sum(range(24)))] * 4


def case_lbfgs() -> None:
    """Its line search calls the closure many times, on all ranks alike."""
    torch.manual_seed(0)
    whole, ddp = nn.Linear(6, 2).double(), DistributedDataParallel(nn.Linear(6, 2).double())
    ddp.module.load_state_dict(whole.state_dict())
    x = torch.randn(8 * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(1)).double()
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    for module, data in ((whole, x), (ddp, part)):
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.2, max_iter=8)

        def closure(module=module, data=data, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (module(data) - data[:, :2]).square().mean()
            loss.backward()
            if module is ddp:
                dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
            return loss

        for _ in range(3):
            optimizer.step(closure)
    assert_same_on_all_ranks(dict(ddp.module.named_parameters()))
    for p, q in zip(whole.parameters(), ddp.parameters(), strict=True):
        assert (q - p).abs().max() < 1e-9


def case_models_that_alternate() -> None:
    """A generator and a discriminator: steps of one, then of the other, with gradients through both."""
    torch.manual_seed(0)
    nets = {name: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for name in ("a", "b")}
    ddps = {name: DistributedDataParallel(net, broadcast_buffers=False) for name, net in nets.items()}
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for turn in range(6):
        name = "ab"[turn % 2]
        other = "ba"[turn % 2]
        for net in nets.values():
            net.requires_grad_(True)
            net.zero_grad()
        nets[other].requires_grad_(False)
        ddps[name](nets[other](x)).square().mean().backward()
        with torch.no_grad():
            for p in nets[name].parameters():
                p.sub_(p.grad, alpha=0.1)
        assert all(p.grad is None for p in nets[other].parameters())
        assert_same_on_all_ranks(dict(nets[name].named_parameters()))


def case_ranks_with_more_batches_than_others() -> None:
    rank, size = mine()
    for by_all in (True, False):
        ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        with torch.no_grad():
            ddp.module.weight.zero_()
        with Join([ddp], divide_by_initial_world_size=by_all):
            for step in range(2 + 2 * rank):
                ddp.zero_grad()
                ddp(torch.full((1, 3), float(1 + step))).sum().backward()
                here = [r for r in range(size) if step < 2 + 2 * r]
                want = (1 + step) * len(here) / (size if by_all else len(here))
                assert torch.allclose(ddp.module.weight.grad, torch.full((1, 3), want)), (by_all, step)


def case_remote_calls_beside_the_group() -> None:
    rank, size = mine()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    where = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port[0]}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=where)
    other = f"rank{(rank + 1) % size}"
    asked = rpc.rpc_async(other, torch.add, args=(torch.ones(3), rank))
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert asked.wait().tolist() == [1.0 + rank] * 3
    assert rpc.rpc_sync(other, dist.get_rank) == (rank + 1) % size
    rpc.shutdown()
    dist.all_reduce(total)
    assert total.eq(size * size).all()


def case_a_group_goes_on_after_an_error() -> None:
    """Go on with the next operation, alike on all ranks, once all have failed in one."""
    rank, size = mine()
    group = dist.new_group(timeout=timedelta(seconds=2))
    failures = {
        "sizes that differ": lambda: dist.all_reduce(torch.ones(4 + rank), group=group),
        "large sizes that differ": lambda: dist.all_reduce(torch.ones(400_000 + rank), group=group),
        "dtypes that differ": lambda: dist.all_reduce(
            torch.ones(4, dtype=torch.float64 if rank else torch.float32), group=group
        ),
        "an output that is too small": lambda: dist.all_gather_into_tensor(
            torch.ones(1), torch.ones(4), group=group
        ),
        "rows that cannot be split": lambda: dist.all_to_all_single(
            torch.ones(size + 1), torch.ones(size + 1), group=group
        ),
        "a layout that is not carried": lambda: dist.all_reduce(torch.eye(3).to_sparse_csr(), group=group),
        "a rank that is late": lambda: (
            time.sleep(3.0 * (rank == 1)),
            dist.all_reduce(torch.ones(4), group=group),
        ),
    }
    for what, fail in failures.items():
        with pytest.raises((hc.HybridcompError, ValueError, NotImplementedError)):
            fail()
        MPI.COMM_WORLD.Barrier()  # the late one has come
        for n in (5, 300_000):
            total = torch.full((n,), 1.0 + rank)
            dist.all_reduce(total, group=group)
            assert total.eq(size * (size + 1) / 2).all(), (what, n)
        seen = [None] * size
        dist.all_gather_object(seen, rank, group=group)
        assert seen == list(range(size)), what


def _held() -> tuple[int, int, int]:
    """Return pages of memory, threads and descriptors that this process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages, threading.active_count(), len(os.listdir("/proc/self/fd"))


def case_many_small_operations_and_steps_leave_nothing() -> None:
    x, parts = torch.ones(64), torch.empty(64 * dist.get_world_size())
    net = nn.Linear(32, 32)
    plain, hooked = DistributedDataParallel(net), DistributedDataParallel(nn.Linear(32, 32))
    hooked.register_comm_hook(hct.HookState("int8", module=hooked), hct.comm_hook)

    def operations(count: int) -> None:
        for turn in range(count // 4):
            dist.all_reduce(x.fill_(1.0))
            dist.broadcast(x, turn % dist.get_world_size())
            dist.all_gather_into_tensor(parts, x)
            dist.all_reduce(x, async_op=True).wait()

    def steps(count: int) -> None:
        for turn in range(count):
            ddp = (plain, hooked)[turn % 2]
            ddp(torch.ones(2, 32)).square().mean().backward()
            ddp.zero_grad()

    operations(2_000)
    steps(300)
    before = _held()
    operations(20_000)
    steps(3_000)
    after = _held()
    assert after[0] - before[0] < 2_000, (before, after)  # 8 MB
    assert after[1] <= before[1] + 1, (before, after)  # a second thread of callbacks may have been needed
    assert after[2] == before[2], (before, after)
