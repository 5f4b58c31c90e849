"""Fifty steps with the DDP hook leave the same bits on all ranks."""

import torch
import torch.distributed as dist

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


def case_fifty_steps_leave_the_replicas_identical() -> None:
    for codec, form in FEEDBACK.items():
        ddp = hooked("hybridcomp", policy(codec, feedback=form, min_bytes=0), model(1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for i in range(50):
            x, y = (t.roll(i, 0).chunk(dist.get_world_size())[dist.get_rank()] for t in batch(60))
            optimizer.zero_grad()
            loss_of(ddp(x), y).backward()
            optimizer.step()
        assert all(torch.isfinite(p).all() for p in ddp.parameters()), codec
        assert_same_on_all_ranks(parameters(ddp))
