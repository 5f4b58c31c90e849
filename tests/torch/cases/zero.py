"""ZeRO-1: DDP with and without our hook, the optimizer's state sharded by ``ZeroRedundancyOptimizer``."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from hybridcomp.policy.toml import parse_policy
from tests.torch.models.fsdp import batch, error, loss_of, net, same_everywhere, train

NAMED = parse_policy('min_bytes = 0\n[dp]\nbroadcast = "int8:block=64"\n', "named.toml")


def run(policy: str, *, hook: bool, views: bool, steps: int = 6):
    group = dist.new_group(pg_options=hct.Options(policy=policy, axis="dp"))
    ddp = DistributedDataParallel(net(), process_group=group)
    if hook:
        ddp.register_comm_hook(hct.HookState(policy, module=ddp), hct.comm_hook)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, group, parameters_as_bucket_view=views, lr=3e-3
    )
    losses = train(ddp, optimizer, range(steps))
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, losses, group


def reference(steps: int = 6) -> dict[str, torch.Tensor]:
    """Train one process on all ranks' batches."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        pairs = [batch(step, rank) for rank in range(dist.get_world_size())]
        torch.stack([((model(x) - y) ** 2).mean() for x, y in pairs]).mean().backward()
        optimizer.step()
    return dict(model.named_parameters())


def case_exact() -> None:
    expected = reference()
    for views in (False, True):
        got, _, _ = run("none", hook=False, views=views)
        same_everywhere(got)
        for name, value in got.items():
            assert error(value, expected[name]) < 1e-4, name


def case_compressed_gradients_exact_parameters() -> None:
    start = dict(net().named_parameters())
    expected = reference()
    for policy, hook, views in (
        ("hybrid", True, False),
        ("int8:block=64", True, True),
        ("int8:block=64", False, False),
    ):
        got, losses, group = run(policy, hook=hook, views=views)
        same_everywhere(got)
        assert losses[-1] < losses[0]
        for name, value in got.items():
            moved = error(expected[name], start[name])
            assert error(value, expected[name]) < 0.5 * moved, (policy, name)
            # Parameters that an int8 broadcast had rounded would be multiples of few scales.
            assert value.unique().numel() > 0.9 * value.numel() or value.numel() < 100, (policy, name)
        rows = [r for r in group.comm.stats() if r.op == "broadcast" and "ZeRO" in r.reason]
        assert sum(r.calls for r in rows) >= 6
        assert all(r.codec == "none" for r in rows)


def case_overlapped_with_ddp() -> None:
    group = dist.new_group(pg_options=hct.Options(policy=NAMED, axis="dp"))
    ddp = DistributedDataParallel(net(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, group, overlap_with_ddp=True, lr=3e-3
    )
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
    for step in range(5):  # the first ones warm up, as torch has it
        optimizer.zero_grad()
        loss_of(ddp, step).backward()  # and the optimizer's step
    got = {name: p.detach() for name, p in ddp.module.named_parameters()}
    same_everywhere(got)
    moved = [error(p, q) for p, q in zip(got.values(), net().parameters(), strict=True)]
    assert max(moved) > 0
    rows = [r for r in group.comm.stats() if r.op == "broadcast" and "ZeRO" in r.reason]
    assert sum(r.calls for r in rows) > 0
    assert all(r.codec == "none" for r in rows)


def case_other_broadcasts_follow_the_policy() -> None:
    group = dist.new_group(pg_options=hct.Options(policy=NAMED, axis="dp"))
    values = torch.randn(1000)
    sent = values.clone()
    dist.broadcast(sent, 0, group=group)
    assert 0 < error(sent, values) < 0.02 or dist.get_rank() > 0
    same_everywhere({"sent": sent})
