"""The DDP hook on parameters of any shape, and on several micro-batches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from tests.torch.cases.hook import BACKENDS, expected, group, hooked, policy
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


class Complex(nn.Module):
    """Complex parameters of both widths, a scalar, one of an odd number of elements, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.matrix = nn.Parameter(torch.randn(64, 37, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4099, dtype=torch.complex128))
        self.real = nn.Linear(37, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (x.to(torch.complex64) @ self.matrix) * self.scalar
        return self.real(turned.real + 2 * turned.imag).square().sum() + ((self.wide * x[0]).abs() ** 2).sum()


def case_complex_parameters() -> None:
    """They are averaged as pairs of reals: all of them, with what a lossy codec loses made up for."""
    inputs = [
        torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())
    ]
    whole = Complex()
    (sum(whole(x) for x in inputs) / len(inputs)).backward()
    for backend in BACKENDS:
        for codec in ("none", "int8", "int4", "powersgd:rank=60", "topk:ratio=1.0", "lattice:bits=16"):
            ddp = hooked(backend, policy(codec, feedback=codec != "none", min_bytes=0), Complex())
            totals = {name: torch.zeros_like(p) for name, p in ddp.module.named_parameters()}
            for count in range(1, 5):
                ddp.zero_grad()
                ddp(inputs[dist.get_rank()]).backward()
                worst = 0.0
                for (name, p), want in zip(ddp.module.named_parameters(), whole.parameters(), strict=True):
                    totals[name] += p.grad
                    worst = max(worst, relative_error(_pairs(totals[name]), _pairs(want.grad) * count))
                exact = codec in ("none", "topk:ratio=1.0") or dist.get_world_size() == 1
                assert worst < (1e-5 if exact else 0.3 / count), (backend, codec, count, worst)
            assert_same_on_all_ranks({name: _pairs(p.grad) for name, p in ddp.module.named_parameters()})
            kept = {
                key.rpartition("/")[2]: a.size for key, a in ddp.state.memory().items() if "residual" in key
            }
            if codec == "int4" and dist.get_world_size() > 1:
                assert any(size == 2 * 64 * 37 for size in kept.values()), kept


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


class Words(nn.Module):
    """A table whose gradients are sparse, before a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.EmbeddingBag(200, 24, sparse=True, mode="sum")
        self.layer = nn.Linear(24, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table((x.abs() * 50).long())).square().mean()


def case_sparse_gradients() -> None:
    """They go as DDP sends them without a hook, with its values, and the statistics say so; others are compressed."""
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for backend in BACKENDS:
        for more in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}):
            plain = DistributedDataParallel(Words(), process_group=group(backend), **more)
            ddp = hooked(backend, policy("int8", min_bytes=0), Words(), **more)
            for _ in range(3):
                for module in (plain, ddp):
                    module.zero_grad()
                    module(inputs).backward()
                got, want = (module.module.table.weight.grad.coalesce() for module in (ddp, plain))
                assert torch.equal(got.indices(), want.indices()), (backend, more)
                assert torch.equal(got.values(), want.values()), (backend, more)
                dense, exact = (module.module.layer.weight.grad for module in (ddp, plain))
                lossy = dist.get_world_size() > 1
                assert 1e-6 * lossy <= relative_error(dense, exact) < 0.05, (backend, more)
            assert ddp.state.step == 3
            rows = {row.reason: row for row in ddp.state.rows()}
            row = rows["sparse gradients go as DDP sends them"]
            assert (row.codec, row.calls) == ("none", 3)
            assert row.raw_bytes == 3 * inputs.numel() * (
                24 * 4 + 8
            )  # an entry for each word, with its index
            assert (row.wire_bytes > 0) == (backend == "gloo" and dist.get_world_size() > 1)


def case_a_buffer_is_filled_by_its_parameters() -> None:
    """Refuse on all ranks to average a buffer with elements that no parameter has, and average the next one."""
    for backend in BACKENDS:
        state = hct.HookState("int8:min_bytes=0", process_group=group(backend))
        if dist.get_world_size() == 1:
            continue
        for size in (31, 33):
            with pytest.raises(
                hc.CodecMismatchError,
                match=f"hook:dp: a buffer of {size} elements was handed out for .* of 32",
            ):
                state.average(torch.ones(size), lambda: [("a", (4, 8))], "a", 0)
        mine = torch.full((32,), float(dist.get_rank()))
        state.average(mine, lambda: [("a", (4, 8))], "a", 1).wait()
        assert (mine - (dist.get_world_size() - 1) / 2).abs().max() < 0.05


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
