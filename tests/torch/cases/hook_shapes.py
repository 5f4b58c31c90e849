"""The DDP hook on parameters of any shape, and on several micro-batches."""

import torch
import torch.distributed as dist
from torch import nn

from tests.torch.cases.hook import BACKENDS, expected, hooked, policy
from tests.torch.models.ddp import batch, loss_of, relative_error
from tests.torch.models.parallel import assert_same_on_all_ranks


def case_gradient_accumulation() -> None:
    exact = expected()
    for backend in BACKENDS:
        ddp = hooked(backend, "none")
        x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(60))
        with ddp.no_sync():
            loss_of(ddp(x), y).backward()
        (loss_of(ddp(x), y) * 3).backward()
        assert ddp.state.step == 1
        for name, p in ddp.module.named_parameters():
            assert relative_error(p.grad, 4 * exact[name]) < 2e-6, name


class Odd(nn.Module):
    """Parameters of all shapes: a scalar, empty ones, a vector, a kernel, a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 7))
        self.vector = nn.Parameter(torch.randn(4099))
        self.kernel = nn.Parameter(torch.randn(8, 3, 5, 5))
        self.frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.matrix = nn.Parameter(torch.randn(64, 65).t()[:, 1:].clone(memory_format=torch.preserve_format))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x[:64] @ self.frozen @ self.matrix[:64, :32]
        return (
            out.square().mean() * self.scalar
            + self.empty.sum()
            + (self.vector * x[0]).square().sum()
            + (self.kernel * x[1]).sum() ** 2
        )


def case_parameters_of_any_shape() -> None:
    inputs = [
        torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())
    ]
    whole = Odd()
    (sum(whole(x) for x in inputs) / len(inputs)).backward()
    for backend in BACKENDS:
        for codec in ("none", "int8", "powersgd:rank=60", "topk:ratio=1.0", "lattice:bits=16"):
            ddp = hooked(backend, policy(codec, feedback=codec != "none", min_bytes=0), Odd())
            for _ in range(2):
                ddp.zero_grad()
                ddp(inputs[dist.get_rank()]).backward()
            for (name, p), want in zip(ddp.module.named_parameters(), whole.parameters(), strict=True):
                if want.grad is None or not want.numel():
                    assert p.grad is None or not p.grad.numel(), name
                    continue
                error = relative_error(p.grad, want.grad)
                assert error < (1e-5 if codec in ("none", "topk:ratio=1.0") else 0.06), (codec, name, error)


def case_shapes_of_one_size() -> None:
    """Messages are not of one length: factors of matrices, and shards of tensors that travel as one array."""
    for backend in BACKENDS:
        for codec in ("powersgd:rank=2", "none"):
            layers = [
                nn.Linear(40, 30, bias=False),
                nn.Linear(30, 40, bias=False),
                nn.Linear(40, 1, bias=False),
                nn.Linear(1, 40, bias=False),
            ]
            ddp = hooked(backend, policy(codec, min_bytes=1000), nn.Sequential(*layers), bucket_cap_mb=1e-6)
            for _ in range(3):
                ddp.zero_grad()
                ddp(torch.ones(2, 40) * (1 + dist.get_rank())).square().sum().backward()
            assert_same_on_all_ranks({name: p.grad for name, p in ddp.named_parameters()})
