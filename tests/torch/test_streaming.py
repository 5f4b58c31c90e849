"""Streamed linear layers: on several ranks, and what one process can tell."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hybridcomp.torch as hct
from hybridcomp.torch.streaming.layer import StreamedLinear
from tests.torch.harness import case_names, check_case
from tests.torch.models.streaming import LR, RANK, STREAMED, Rule, batch, gradients, loss_of, net, step

CASES = [
    *((3, case) for case in case_names("streaming")),
    *((4, case) for case in ("case_streaming_is_its_rule", "case_coarse_factors_have_the_same_bits")),
]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_case(ranks: int, case: str) -> None:
    check_case("streaming", ranks, case)


def bases(streamed: hct.StreamedLayers) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    factors = {name: streamed.factors_of(weight) for name, weight in streamed.weights.items()}
    return {name: (each.left, each.right) for name, each in factors.items()}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_layer_computes_and_passes_on_what_it_did() -> None:
    model, plain = net(), net()
    streamed = hct.stream_linear(model, RANK)
    assert tuple(streamed.weights) == STREAMED
    for given in (batch(0, 0), batch(0, 0)[0, 0], batch(0, 0)[:0], batch(0, 0).transpose(0, 1)):
        x, y = given.clone().requires_grad_(), given.clone().requires_grad_()
        assert torch.allclose(model(x), plain(y), atol=1e-12)
        loss_of(model, x).backward()
        loss_of(plain, y).backward()
        assert torch.allclose(x.grad, y.grad, atol=1e-12)
    for name, p in model.named_parameters():
        if name in STREAMED:
            assert p.grad is None
        else:
            assert torch.allclose(p.grad, plain.get_parameter(name).grad, atol=1e-12)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(batch(0, 1)), plain(batch(0, 1)))


def test_a_constant_gradient_gets_its_best_approximation() -> None:
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((size, 8)))[0] for size in (20, 14))
    sizes = 0.5 ** np.arange(8)
    g = torch.from_numpy((u * sizes) @ v.T)
    layer = nn.Linear(14, 20, bias=False).double()
    optimizer = hct.stream_linear(layer, RANK).optimizer(lr=1.0)
    best = torch.from_numpy((u[:, :RANK] * sizes[:RANK]) @ v[:, :RANK].T)
    errors = []
    for _ in range(40):
        before = layer.weight.clone()
        (layer(torch.eye(14, dtype=torch.float64)) * g.T).sum().backward()
        optimizer.step()
        errors.append((before - layer.weight - best).norm().item())
    assert errors[-1] < 1e-9
    # The error shrinks by the ratio of singular values in each step, at least.
    assert all(later < 0.6 * earlier for earlier, later in itertools.pairwise(errors[5:20]))


def test_as_many_columns_as_the_smaller_side_are_sgd() -> None:
    model, plain = net(), net()
    optimizer = hct.stream_linear(model, 100).optimizer(lr=LR, weight_decay=0.1)
    theirs = torch.optim.SGD([plain.get_parameter(name) for name in STREAMED], lr=LR, weight_decay=0.1)
    for t in range(4):
        for m, o in ((model, optimizer), (plain, theirs)):
            o.zero_grad()
            loss_of(m, batch(0, t)).backward()
            o.step()
    for name in STREAMED:
        assert (model.get_parameter(name) - plain.get_parameter(name)).abs().max() < 1e-9


class Shapes(TorchDispatchMode):
    """Mode that keeps the shapes of all tensors that operations allocate."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.seen |= {tuple(tensor.shape), tuple(tensor.shape)[::-1]}
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_formed(dtype: torch.dtype) -> None:
    def seen(streams: bool) -> set[tuple[int, ...]]:
        model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(inplace=True), nn.Linear(400, 300)).to(dtype)
        weights = [model[0].weight, model[2].weight]
        optimizer = (
            hct.stream_linear(model, 4).optimizer(lr=0.1) if streams else torch.optim.SGD(weights, lr=0.1)
        )
        loss = model(torch.randn(2, 3, 300).to(dtype)).square().mean()
        with Shapes(weights) as shapes:
            loss.backward()
            optimizer.step()
        return shapes.seen

    assert (300, 400) in seen(streams=False)  # this test can fail
    assert (300, 400) not in seen(streams=True)
    assert (300, 4) in seen(streams=True)


def test_bytes_are_those_of_factors() -> None:
    streamed = hct.stream_linear(nn.Linear(100, 50), 4)
    assert streamed.nbytes == 4 * (100 + 50) * 4
    assert streamed.dense_nbytes == 4 * 100 * 50


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_computed_again(reentrant: bool) -> None:
    model, alone = net(), net()
    streamed = hct.stream_linear(model, RANK)
    optimizer, rule = streamed.optimizer(lr=LR, weight_decay=0.01), Rule(bases(streamed))
    inner = model.twice.forward
    model.twice.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)
    for t in range(3):
        loss_of(model, batch(0, t)).backward()
        optimizer.step()
        found = gradients(alone, [batch(0, t)], 1)
        step(alone, rule, {name: g if name in STREAMED else 0 * g for name, g in found.items()})
    for name in STREAMED:
        assert (model.get_parameter(name) - alone.get_parameter(name)).abs().max() < 1e-9


def test_autocast_computes_as_for_linear_layers() -> None:
    model, plain = (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)) for _ in range(2)
    )
    plain.load_state_dict(model.state_dict())
    streamed = hct.stream_linear(model, 16)
    x = torch.randn(6, 8)
    for m in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
            assert out.dtype is torch.bfloat16
            out.float().square().mean().backward()  # in autocast, too
    assert torch.equal(model[0].bias.grad, plain[0].bias.grad)
    for name, weight in streamed.weights.items():
        a, b = streamed.factors_of(weight).gradient()
        wanted = plain.get_parameter(name).grad
        assert (a @ b.T - wanted).norm() < 1e-2 * wanted.norm(), name
        assert a.dtype is torch.float32


def test_schedulers_change_the_rate() -> None:
    model, alone = net(), net()
    streamed = hct.stream_linear(model, RANK)
    optimizer, rule = streamed.optimizer(lr=2 * LR), Rule(bases(streamed))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=9)
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    schedule.step()
    found = gradients(alone, [batch(0, 0)], 1)
    for name in STREAMED:
        wanted = alone.get_parameter(name) - LR * rule.direction(name, found[name])
        assert (model.get_parameter(name) - wanted).abs().max() < 1e-9


def test_a_step_that_is_given_up_leaves_nothing() -> None:
    model = net()
    streamed = hct.stream_linear(model, RANK)
    optimizer = streamed.optimizer(lr=LR)
    loss_of(model, batch(0, 0)).backward()
    assert streamed.grad_norm() > 0
    with pytest.raises(
        RuntimeError, match=r"outer\.weight came after its factors were averaged: call step\(\)"
    ):
        loss_of(model, batch(0, 1)).backward()
    optimizer.zero_grad()
    assert streamed.grad_norm() == 0
    before = values(model)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())
    loss_of(model, batch(0, 1)).backward()


def test_a_copy_of_a_model_trains_by_itself() -> None:
    model = net()
    hct.stream_linear(model, RANK)
    other = copy.deepcopy(model)
    loss_of(other, batch(0, 0)).backward()
    assert model.twice.factors.square_parts()[0].norm() == 0
    assert other.twice.factors.square_parts()[0].norm() > 0


def test_what_is_no_plain_linear_layer_stays() -> None:
    class Own(nn.Linear):
        pass

    with warnings.catch_warnings(action="ignore"):
        attention = nn.MultiheadAttention(4, 2)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(6, 4),
            "tied": nn.Linear(4, 6),
            "own": Own(4, 4),
            "attention": attention,
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "left": nn.Linear(4, 4),
            "one": nn.Linear(4, 4),
            "same": nn.Linear(4, 4),
        }
    )
    model["tied"].weight = model["embedding"].weight
    model["same"].weight = model["one"].weight
    streamed = hct.stream_linear(model, 2, exclude=["le*"])
    assert list(streamed.weights) == ["one.weight"]
    assert [name for name, m in model.named_modules() if type(m) is StreamedLinear] == ["one", "same"]
    model["same"](model["one"](torch.randn(3, 4))).sum().backward()
    assert streamed.grad_norm() > 0


def test_gradients_are_clipped_without_any_that_are_formed() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    streamed = hct.stream_linear(model, rank=2)
    model(torch.randn(3, 8)).sum().backward()
    norm = streamed.grad_norm()
    assert streamed.clip_grad_norm_(norm / 2) == pytest.approx(norm)
    assert streamed.clip_grad_norm_(norm, model.parameters()) == pytest.approx(norm / 2, rel=1e-5)


def test_a_layer_whose_forward_is_replaced_is_refused() -> None:
    model = net()
    layer = next(m for m in model.modules() if type(m) is nn.Linear)
    layer.forward = layer.forward  # as wrappers do that patch an instance
    with pytest.raises(ValueError, match="has a forward of its own, set on the instance: exclude it"):
        hct.stream_linear(model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1, not 0"),
        ({"rank": 2.5}, "rank must be an integer of at least 1, not 2.5"),
        ({"exclude": ["nosuch"]}, "exclude 'nosuch' names no linear layer"),
        ({"exclude": ["*"]}, r"no nn\.Linear with a weight of its own"),
        ({"policy": "nosuch"}, "unknown policy 'nosuch'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hct.stream_linear(net(), **arguments)


def test_wrong_models_rates_and_states_are_named() -> None:
    model = net()
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    for wrong, words in (
        (mixed, "on one device, not on cpu, meta"),
        (nn.Linear(2, 2, dtype=torch.complex64), r"weight is torch\.complex64"),
        (wrapped, "stream_linear comes before DistributedDataParallel"),
    ):
        with pytest.raises(ValueError, match=words):
            hct.stream_linear(wrong)
    streamed = hct.stream_linear(model, RANK)
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        hct.stream_linear(model)
    for numbers in ({"lr": -1.0}, {"lr": 1.0, "weight_decay": -0.1}, {"lr": float("inf")}):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            streamed.optimizer(**numbers)
    other = hct.stream_linear(net(), 2).optimizer(lr=1.0)
    with pytest.raises(
        ValueError, match=r"of inner\.weight the saved state has a basis \[12, 2\], and this has \[12, 3\]"
    ):
        streamed.optimizer(lr=1.0).load_state_dict(other.state_dict())
