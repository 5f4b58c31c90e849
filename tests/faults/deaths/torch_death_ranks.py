"""Ranks of :mod:`.torch_deaths`: train, until one of them is killed. Run by ``python -m ... FOLDER`` under mpiexec.

Every step's losses and gradients are written down, so that what ranks report before the signal can be compared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from tests.faults.deaths.rank_log import Log

WORLD = MPI.COMM_WORLD
_STEPS = 400  # at most: the signal comes before
_WIDTH = 160


def net() -> nn.Sequential:
    """Make the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))


def batch(step: int) -> torch.Tensor:
    """Return this rank's inputs of a step."""
    return torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(1000 * step + WORLD.rank))


def ddp(codec: str) -> Callable[[int], bytes]:
    """Train by DDP with the hook."""
    model = DistributedDataParallel(net())
    model.register_comm_hook(hct.HookState(codec, axis="default"), hct.comm_hook)

    def step(number: int) -> bytes:
        model.zero_grad()
        model(batch(number)).square().mean().backward()
        return b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None)

    return step


def fsdp(codec: str) -> Callable[[int], bytes]:
    """Train by FSDP2."""
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    hct.compress_fsdp(model, codec)

    def step(number: int) -> bytes:
        model.zero_grad()
        loss = model(batch(number)).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.numpy().tobytes()

    return step


def pipeline(codec: str) -> Callable[[int], bytes]:
    """Send activations from rank to rank, and their gradients back; two micro-batches are on their way."""
    hct.set_policy(codec)
    stage = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())
    rank, last = WORLD.rank, WORLD.size - 1

    def step(number: int) -> bytes:
        inputs, outputs = [], []
        for micro in range(2):
            x = batch(2 * number + micro)
            if rank > 0:
                dist.recv(x, rank - 1)
                x.requires_grad_()
            inputs.append(x)
            outputs.append(stage(x))
            if rank < last:
                dist.send(outputs[-1].detach(), rank + 1)
        for x, y in zip(inputs, outputs, strict=True):
            gradient = torch.ones_like(y)
            if rank < last:
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank > 0 and x.grad is not None:
                dist.send(x.grad, rank - 1)
        return b""

    return step


def diloco(codec: str) -> Callable[[int], bytes]:
    """Train apart, and synchronise one of two fragments in each step, which is averaged while the next one runs."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = {"fragment_sync_delay": 1, "fragment_sync_order": "paper"}
    context = hct.DiLoCo(model, inner, every=2, fragments=2, policy=codec, **more)
    context.__enter__()
    agreed = context._sync.globals.values()

    def step(number: int) -> bytes:
        model.zero_grad()
        model(batch(number)).square().mean().backward()
        inner.step()
        return b"".join(value.detach().numpy().tobytes() for value in agreed)

    return step


KINDS: dict[str, Callable[[str], Callable[[int], bytes]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "pipeline": pipeline,
    "diloco": diloco,
}


def main(folder: Path) -> None:
    """Train until an error comes, and write it down."""
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    log = Log(folder, WORLD.rank)
    hct.set_policy("none" if plan["kind"] == "ddp" else plan["codec"])
    WORLD.Barrier()  # from here on all are quick
    dist.init_process_group("hybridcomp", timeout=timedelta(seconds=plan["timeout"]))
    step = KINDS[plan["kind"]](plan["codec"])
    step(0)
    WORLD.Barrier()
    for number in range(1, _STEPS):
        if WORLD.rank == plan["victim"] and number == plan["at"]:
            log.arm()
        began = time.monotonic()
        try:
            bits = step(number)
        except Exception as error:
            log.failed(f"step {number}", error, time.monotonic() - began)
            break
        log.right(f"step {number}", bits, common=plan["kind"] != "pipeline")
    log.leave()
    os._exit(0)  # MPI_Finalize waits for the dead


if __name__ == "__main__":
    main(Path(sys.argv[1]))
