"""Uses of DDP, each with ``HYBRIDCOMP_HOOK`` and without: what is trained must be the same, and none may fail.

``python uses_of_ddp.py BACKEND`` on two ranks; the policy says ``none``. Prints a line for each use that differs.
"""

from __future__ import annotations

import copy
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

Then = Callable[[DDP], DDP | None]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(40, 6, sparse=True, mode="sum"), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x.abs() * 10).long() % 40))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if dist.get_rank() else self.right(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.h = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.to(torch.complex64) @ self.w) * self.h).abs()


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)


def data(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(7 * step + dist.get_rank())).to(dtype)


def train(ddp: DDP, then: Then | None = None, dtype: torch.dtype = torch.float32, steps: int = 3) -> DDP:
    """Take some steps; ``then`` follows the first, and may return another module to go on with."""
    for step in range(steps):
        ddp.zero_grad()
        ddp(data(step, dtype)).square().mean().backward()
        with torch.no_grad():
            for p in ddp.parameters():
                if p.grad is not None:
                    p.sub_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=0.05)
        if then and not step:
            ddp = then(ddp) or ddp
    return ddp


def uneven(**how: bool) -> DDP:
    ddp = DDP(net())
    with Join([ddp], **how):
        return train(ddp, steps=2 + 2 * dist.get_rank())


def hook_of_ones_own(ddp: DDP) -> None:
    def hook(state, bucket):
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(lambda done: done.value() * 3)

    ddp.register_comm_hook(None, hook)


def reloaded(ddp: DDP) -> DDP:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def accumulated() -> DDP:
    ddp = DDP(net())
    with ddp.no_sync():
        ddp(data(0)).square().mean().backward()
    return train(ddp)


def fused(ddp: DDP) -> None:
    ddp._register_fused_optim(torch.optim.SGD, 0.05)


def sharded() -> DDP:
    ddp = DDP(net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.05)
    ddp(data(0)).square().mean().backward()
    optimizer.step()
    return ddp


def scaled() -> DDP:
    ddp, scaler = DDP(net()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with torch.autocast("cpu"):
        loss = ddp(data(0)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return ddp


@contextmanager
def python_reducer() -> Iterator[None]:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        yield
    finally:
        torch._dynamo.config.optimize_ddp = True


def without_buckets() -> DDP:
    with python_reducer():
        return train(DDP(net()))


def alone() -> DDP:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return train(DDP(net(), process_group=groups[dist.get_rank()]))


def builtin(kind: dist.BuiltinCommHookType) -> Then:
    return lambda ddp: ddp._register_builtin_comm_hook(kind)


def power(ddp: DDP) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


USES: dict[str, Callable[[], DDP]] = {
    "plain": lambda: train(DDP(net())),
    "sparse": lambda: train(DDP(Words())),
    "sparse in views": lambda: train(DDP(Words(), gradient_as_bucket_view=True)),
    "sparse, some unused": lambda: train(DDP(Words(), find_unused_parameters=True)),
    "complex": lambda: train(DDP(Complex())),
    "float64": lambda: train(DDP(net(torch.float64)), dtype=torch.float64),
    "bfloat16": lambda: train(DDP(net(torch.bfloat16)), dtype=torch.bfloat16),
    "unused": lambda: train(DDP(Branches(), find_unused_parameters=True)),
    "static graph": lambda: train(DDP(net(), static_graph=True)),
    "views": lambda: train(DDP(net(), gradient_as_bucket_view=True)),
    "accumulated": accumulated,
    "join": uneven,
    "join by number": lambda: uneven(divide_by_initial_world_size=False),
    "hook of one's own": lambda: train(DDP(net()), hook_of_ones_own),
    "fp16": lambda: train(DDP(net()), builtin(dist.BuiltinCommHookType.FP16_COMPRESS)),
    "allreduce": lambda: train(DDP(net()), builtin(dist.BuiltinCommHookType.ALLREDUCE)),
    "PowerSGD's exact steps": lambda: train(DDP(net()), power),
    "copied": lambda: train(DDP(net()), copy.deepcopy),
    "reloaded": lambda: train(DDP(net()), reloaded),
    "fused": lambda: train(DDP(net()), fused, steps=1),
    "ZeRO": sharded,
    "scaled": scaled,
    "without buckets": without_buckets,
    "one rank": alone,
}


def outcome(use: Callable[[], DDP], hook: str) -> dict[str, torch.Tensor]:
    os.environ["HYBRIDCOMP_HOOK"] = hook
    torch.manual_seed(0)
    return {name: value.detach().clone() for name, value in use().state_dict().items()}


def main(backend: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(backend)
    for name, use in USES.items():
        plain, hooked = outcome(use, "0"), outcome(use, "1")
        for key, value in plain.items():
            if not torch.allclose(value, hooked[key], rtol=1e-5, atol=1e-6):
                os.write(1, f"{name}: {key} differs\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
