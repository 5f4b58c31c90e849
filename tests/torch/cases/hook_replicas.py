"""Steps with the DDP hook leave the same bits on all ranks, and so do those in which ``auto`` changes the codec."""

import torch
import torch.distributed as dist

import hybridcomp.torch as hct
from tests.torch.cases.hook import LOSSY, hooked, policy
from tests.torch.cases.hook_training import parameters
from tests.torch.models.ddp import batch, loss_of, model
from tests.torch.models.parallel import assert_same_on_all_ranks

FEEDBACK = {
    **dict.fromkeys(LOSSY, "ef"),
    "sign": "ef",
    "int2:block=128": "loco",
    "threshold:rel=2": "ef",
    "mxfp4": "ef21",
    "topk:ratio=0.02:values=bf16": "dgc",
}


def train(ddp: torch.nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for i in range(steps):
        x, y = (t.roll(i, 0).chunk(dist.get_world_size())[dist.get_rank()] for t in batch(60))
        optimizer.zero_grad()
        loss_of(ddp(x), y).backward()
        optimizer.step()


def case_fifty_steps_leave_the_replicas_identical() -> None:
    for codec, form in FEEDBACK.items():
        ddp = hooked("hybridcomp", policy(codec, feedback=form, min_bytes=0), model(1))
        train(ddp, 50)
        assert all(torch.isfinite(p).all() for p in ddp.parameters()), codec
        assert_same_on_all_ranks(parameters(ddp))


def case_auto_tries_and_decides_alike() -> None:
    steps, width = 220, 768  # more than its trials take, which are short where operations are long
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
    hct.reset_stats()
    ddp = hooked("hybridcomp", "auto", net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for i in range(steps):
        data = torch.randn(12, width, generator=torch.Generator().manual_seed(i)) * (1 + dist.get_rank())
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in ddp.parameters())
    assert_same_on_all_ranks(parameters(ddp))
    rows = [row for row in hct.stats() if row.axis == "dp" and row.op == "all_reduce"]
    decided = sorted((row.codec, row.reason) for row in rows if row.reason.startswith("auto: "))
    everyone: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, decided)
    assert all(one == decided for one in everyone), everyone
    tried = {codec for codec, reason in decided if reason.startswith("auto: tries")}
    assert {"none", "int4:block=128"} <= tried, decided
    assert any("measured by operation" in reason for _, reason in decided), decided
