"""Optimizers that exchange their momentum, on groups of one to five ranks, over hybridcomp and over gloo."""

import copy
import functools
import gc
import math
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from hybridcomp import CollectiveTimeoutError, MismatchError
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.momentum.optimizer import FLOOR
from tests.torch.cases.hook import directly, policy
from tests.torch.models.onebit import (
    LATE,
    WORDS,
    AloneReference,
    LambReference,
    Net,
    Reference,
    loss_of,
    most_apart,
    words_of,
)

BACKENDS = ("hybridcomp", "gloo")
ALL = "sign:block=65536:min_bytes=0"
FREEZE, STEPS = 6, 14
LENGTHS = {
    hct.OnebitAdam: {"freeze_step": FREEZE},
    hct.OnebitLamb: {"freeze_step": FREEZE, "factor_threshold": LambReference.NEAR},
    hct.ZeroOneAdam: {"warmup_steps": 2, "var_update_scaler": 2},
}


@functools.cache
def group(backend: str, ranks: int) -> dist.ProcessGroup:
    return dist.new_group(list(range(ranks)), backend=backend)


def made(
    backend: str,
    net: nn.Module | None = None,
    *,
    ranks: int | None = None,
    groups: Callable[[nn.Module], list[dict]] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ddp: dict | None = None,
    kind: type = hct.OnebitAdam,
    **options,
) -> tuple[DistributedDataParallel, hct.OnebitAdam]:
    """Return a registered optimizer and its module, of the first ranks."""
    process_group = group(backend, dist.get_world_size() if ranks is None else ranks)
    module = DistributedDataParallel(net or Net(torch.float32), process_group=process_group, **(ddp or {}))
    params = [p for p in module.parameters() if p.requires_grad] if groups is None else groups(module.module)
    optimizer = kind(params, **({"lr": 1e-2} | LENGTHS[kind] | options))
    optimizer.register(module, scaler=scaler)
    return module, optimizer


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range, late: int = FREEZE + 2) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(module, *words_of(step, dist.get_rank(), late)).backward()
        optimizer.step()


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def memory(optimizer: hct.OnebitAdam) -> list[dict]:
    exchange = optimizer._exchange
    return [{k: v.copy() for k, v in m.memory().items()} for m in (exchange, exchange.momentum)]


def assert_same_on_all_ranks(found: dict[str, torch.Tensor]) -> None:
    flat = torch.cat([value.flatten() for value in found.values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(other, flat) for other in everyone)


def two_groups(net: nn.Module, decoupled: bool) -> list[dict]:
    """Return groups that differ in all that a group has; OnebitLamb's decay is always a part of the update."""
    table = {"params": [net.table.weight], "lr": 3e-2, "betas": (0.8, 0.95)}
    rest = [p for name, p in net.named_parameters() if p.requires_grad and not name.startswith("table")]
    return [
        table | {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.05},
    ]


# Of 14 steps, those in which 0/1 Adam takes gradients: two of the warm-up, then 2 + 2 + 2 that grow apart.
RENEWALS = (0, 1, 2, 3, 4, 6, 8, 12)


# 0/1 Adam whose variance stays from step 6 of 14 on, and exchanges after steps 6, 7, 9 and 13.
ALONE = {
    "var_freeze_step": FREEZE,
    "warmup_steps": FREEZE,
    "local_step_scaler": 1,
    "local_step_clipper": 4,
}
EXCHANGES = (*range(FREEZE + 1), 8, 12)  # from 0


def check_rule(kind: type, backend: str, ranks: int, codec: str, cap: float) -> float:
    """Return how far apart the parameters of an optimizer and of its paper's rule are at most."""
    if dist.get_rank() >= ranks:
        return 0.0
    common = {"betas": (0.9, 0.99), "eps": 1e-8, "lr": 1e-2}
    module, optimizer = made(
        backend,
        Net(),
        ranks=ranks,
        groups=functools.partial(two_groups, decoupled=kind is hct.OnebitLamb),
        ddp={"bucket_cap_mb": cap},
        codec=codec,
        warmup="none",
        betas=(0.9, 0.99),
        kind=kind,
    )
    names = [name for name, p in module.module.named_parameters() if p.requires_grad]
    table = {"names": ["table.weight"], **common, "lr": 3e-2, "betas": (0.8, 0.95)}
    table |= {"weight_decay": 0.1, "decoupled": True}
    rest = {"names": names, **common, "weight_decay": 0.05, "decoupled": kind is hct.OnebitLamb}
    small = {name for name, p in module.module.named_parameters() if p.numel() * 8 < 256}  # by default
    exact = None if codec == "none" else set() if codec == ALL else small
    ends = (lambda step: step in RENEWALS) if kind is hct.ZeroOneAdam else (lambda step: step < FREEZE)
    rule = LambReference if kind is hct.OnebitLamb else Reference
    reference = rule(ranks, ends, exact, [rest, table], FLOOR)
    worst = 0.0
    for step in range(STEPS):
        train(module, optimizer, range(step, step + 1))
        reference.take(reference.gradients(FREEZE + 2))
        worst = max(worst, most_apart(module.module, reference.net))
    late = reference.renews["table.weight"][WORDS - LATE :]
    assert bool(late.all()) == (
        kind is not hct.ZeroOneAdam
    )  # 0/1 Adam has renewed the variance since they came
    assert not reference.renews["up.weight"].any()
    return worst


def check_rule_alone(backend: str, ranks: int, codec: str, cap: float) -> float:
    """Return how far apart a rank's parameters and those of 0/1 Adam's rule with local steps are at most."""
    if dist.get_rank() >= ranks:
        return 0.0
    common = {"betas": (0.9, 0.99), "eps": 1e-8, "lr": 1e-2}
    module, optimizer = made(
        backend,
        Net(),
        ranks=ranks,
        groups=functools.partial(two_groups, decoupled=False),
        ddp={"bucket_cap_mb": cap},
        codec=codec,
        warmup="none",
        betas=(0.9, 0.99),
        kind=hct.ZeroOneAdam,
        **ALONE,
    )
    names = [name for name, p in module.module.named_parameters() if p.requires_grad]
    table = {"names": ["table.weight"], **common, "lr": 3e-2, "betas": (0.8, 0.95)}
    table |= {"weight_decay": 0.1, "decoupled": True}
    rest = {"names": names, **common, "weight_decay": 0.05}
    reference = AloneReference(
        lambda step: step not in EXCHANGES,
        ranks,
        lambda step: step < FREEZE,
        None if codec == "none" else set(),
        [rest, table],
        FLOOR,
    )
    worst = 0.0
    for step in range(STEPS):
        train(module, optimizer, range(step, step + 1))
        reference.take(reference.gradients(FREEZE + 2))
        own = reference.own[dist.get_rank()]
        trained = [(name, p) for name, p in module.module.named_parameters() if p.requires_grad]
        worst = max(worst, *(float((p.detach() - own[name]).abs().max()) for name, p in trained))
        assert optimizer.synchronized == (step in EXCHANGES), step
    assert reference.renews["table.weight"][WORDS - LATE :].all()
    return worst


def case_ranks_that_step_by_themselves_have_equal_bits_after_each_exchange() -> None:
    for backend, codec in (("hybridcomp", "sign"), ("gloo", "sign"), ("gloo", "powersgd:rank=2")):
        module, optimizer = made(backend, kind=hct.ZeroOneAdam, codec=codec, lr=3e-3, **ALONE)
        for step in range(STEPS):
            before = sum(row.wire_bytes for row in optimizer._exchange.momentum.rows())
            train(module, optimizer, range(step, step + 1))
            assert optimizer.synchronized == (step in EXCHANGES), step
            if step in EXCHANGES:
                assert_same_on_all_ranks(values(module))
            elif step in (9, 10, 11):
                assert sum(row.wire_bytes for row in optimizer._exchange.momentum.rows()) == before
                with pytest.raises(AssertionError):
                    assert_same_on_all_ranks(values(module))


def case_all_ranks_have_equal_bits_by_every_codec() -> None:
    for backend in BACKENDS:
        for codec in ("sign", "int2", "int4", "powersgd:rank=2", "topk:ratio=0.1"):
            module, optimizer = made(backend, codec=codec, ddp={"bucket_cap_mb": 0.01}, lr=3e-3)
            first = None
            for step in range(3 * FREEZE):
                train(module, optimizer, range(step, step + 1), late=0)
                assert_same_on_all_ranks(values(module))
                state = optimizer.state[module.module.up.weight]
                if step + 1 == FREEZE:
                    first = state["exp_avg_sq"].clone()
            assert torch.equal(first, state["exp_avg_sq"]), codec
            reasons = {row.codec for row in optimizer._exchange.momentum.rows()}
            assert any(found.startswith(codec.partition(":")[0]) for found in reasons), (codec, reasons)
            assert all(torch.isfinite(value).all() for value in values(module).values()), codec


def case_resume_is_bit_identical() -> None:
    for backend in BACKENDS:
        for codec, more in (
            ("sign", {}),
            ("powersgd:rank=2", {}),
            ("int4", {"freeze_step": "auto"}),
            ("sign", {"kind": hct.ZeroOneAdam}),
            ("sign", {"kind": hct.ZeroOneAdam, **ALONE}),
            ("sign", {"kind": hct.OnebitLamb}),
        ):
            options = {"codec": codec, "betas": (0.9, 0.8), "ddp": {"bucket_cap_mb": 0.01}, **more}
            module, optimizer = made(backend, **options)
            saved = {}
            for step in range(STEPS):
                if step in (FREEZE - 3, FREEZE, FREEZE + 3, STEPS - 3):
                    saved[step] = copy.deepcopy(
                        (module.state_dict(), optimizer.state_dict(), memory(optimizer))
                    )
                train(module, optimizer, range(step, step + 1))
            assert optimizer._ran.compressed
            for step, (weights, state, (gradients, momenta)) in saved.items():
                again, other = made(backend, **options)
                again.load_state_dict(weights)
                other.load_state_dict(state)
                other._exchange.load_memory(gradients)
                other._exchange.momentum.load_memory(momenta)
                train(again, other, range(step, STEPS))
                for name, value in values(again).items():
                    assert torch.equal(value, module.get_parameter(name)), (backend, codec, step, name)


def case_the_programs_state_has_what_feedback_remembers() -> None:
    """And is resharded to another number of ranks: what feedback has still to send stays as it is."""
    module, optimizer = made("gloo")
    train(module, optimizer, range(FREEZE + 1))
    mine = {key: value for key, value in hct.state_dict().items() if key.startswith("momentum:dp")}
    told: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, mine)
    fewer = hct.reshard_state(told, 2)
    kept = [key for key in mine if "/residual/" in key and "table.weight" in key]
    assert kept, mine.keys()
    for key in kept:
        if mine[key].is_floating_point():
            before, after = (sum(state[key].double() for state in states) for states in (told, fewer))
            assert torch.allclose(before, after, rtol=1e-5, atol=1e-6), key
            assert before.abs().max() > 0, key
    assert all(state[key].equal(mine[key]) for state in fewer for key in mine if key.endswith("/step"))


def case_parameters_that_were_still_at_the_freeze() -> None:
    """They move no farther than Adam's would, and nothing is divided by zero."""
    for backend in BACKENDS:
        module, optimizer = made(backend, lr=1e-2)
        train(module, optimizer, range(FREEZE), late=FREEZE)
        before = values(module)["module.table.weight"]
        renews = optimizer.state[module.module.table.weight]["renews"]
        assert renews.dtype == torch.bool
        assert bool(renews[WORDS - LATE :].all())
        assert not renews[: WORDS - LATE].all()
        train(module, optimizer, range(FREEZE, STEPS), late=FREEZE)
        moved = (values(module)["module.table.weight"] - before)[WORDS - LATE :].abs()
        assert 1e-3 < float(moved.max()) < 0.35, float(moved.max())
        assert_same_on_all_ranks(values(module))


def case_feedback_of_the_warm_up() -> None:
    """It is that of whole gradients: what travels beside momenta has none, as the next step may have other elements."""
    for backend in BACKENDS:
        for kind in (hct.OnebitAdam, hct.ZeroOneAdam):
            module, optimizer = made(backend, kind=kind, warmup=policy("int8", feedback=True, min_bytes=0))
            train(module, optimizer, range(STEPS), late=FREEZE + 2)
            assert_same_on_all_ranks(values(module))
            gradients, momenta = memory(optimizer)
            sizes = {
                key: array.size
                for part in (gradients, momenta)
                for key, array in part.items()
                if "table" in key
            }
            assert len(sizes) > 1
            assert set(sizes.values()) <= {module.module.table.weight.numel(), 1}, sizes


def case_a_parameter_that_nobody_has_used_yet() -> None:
    """It stays where it is; from its first gradient on, after the freeze, it moves as Adam's would."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.early, self.late = nn.Linear(30, 40), nn.Linear(30, 40)
            self.both = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.early(x) + self.late(x) if self.both else self.early(x)

    for backend in BACKENDS:
        module, optimizer = made(backend, Late(), ddp={"find_unused_parameters": True}, codec=ALL)
        start = module.module.late.weight.detach().clone()
        for step in range(STEPS):
            module.module.both = step > FREEZE + 2
            optimizer.zero_grad()
            module(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
            assert_same_on_all_ranks(values(module))
            still = torch.equal(module.module.late.weight, start)
            assert still == (step <= FREEZE + 2), step
        assert float((module.module.late.weight - start).abs().max()) < 0.2


def scaled_step(module, optimizer, scaler, step: int, scale: float = 1.0, unscaled: bool = False) -> None:
    optimizer.zero_grad()
    loss = loss_of(module, *words_of(step, dist.get_rank(), FREEZE + 2))
    if math.isinf(scale):  # one parameter's gradients overflow, and others' are finite
        loss = loss + (module.module.up.weight * scale).sum() * 0
    scaler.scale(loss).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def case_an_overflow_on_one_rank_is_as_if_it_had_not_been() -> None:
    """All ranks skip the step; weights, momenta and feedback are those of a run without it."""
    bad = (FREEZE - 2, FREEZE, FREEZE + 3, STEPS - 2)  # of 0/1 Adam the last two without exchange and with it
    for backend, options in (
        *((backend, {}) for backend in BACKENDS),
        ("gloo", {"kind": hct.ZeroOneAdam, **ALONE}),
    ):
        runs = []
        for overflows in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
            module, optimizer = made(backend, scaler=scaler, ddp={"bucket_cap_mb": 0.005}, **options)

            attempt = functools.partial(scaled_step, module, optimizer, scaler)
            for step in range(STEPS):
                if overflows and step in bad:
                    before, kept = values(module), memory(optimizer)[1]
                    attempt(step, math.inf if dist.get_rank() == 1 else 1.0, unscaled=step == FREEZE)
                    for name, value in before.items():
                        assert torch.equal(value, module.get_parameter(name)), (backend, step, name)
                    now = memory(optimizer)[1]
                    assert now.keys() == kept.keys()
                    assert all((now[key] == kept[key]).all() for key in kept), (backend, step)
                attempt(step, unscaled=step % 2 == 1)
            runs.append(values(module))
        for name, value in runs[0].items():
            assert torch.equal(value, runs[1][name]), (backend, name)
        plain, optimizer = made(backend, ddp={"bucket_cap_mb": 0.005}, **options)
        train(plain, optimizer, range(STEPS))
        for name, value in values(plain).items():  # a scale is no more than a scale
            assert torch.equal(value, runs[0][name]), (backend, name)


def case_complex_parameters() -> None:
    """They are pairs of reals: in the warm-up Adam's, and after it the same on all ranks."""

    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.turn, self.real = nn.Parameter(torch.randn(40, 30, dtype=torch.complex64)), nn.Linear(30, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.real((x.to(torch.complex64) @ self.turn).abs())

    ends = []
    for ours in (False, True):
        if ours:
            module, optimizer = made("gloo", Turn(), warmup="none")
        else:
            module = DistributedDataParallel(Turn(), process_group=group("gloo", dist.get_world_size()))
            optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for step in range(STEPS if ours else FREEZE):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            module(torch.randn(9, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            if step == FREEZE - 1:
                ends.append(values(module))
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], rtol=1e-4, atol=1e-5), name
    assert not torch.equal(ends[1]["module.turn"], module.module.turn)
    assert_same_on_all_ranks(
        {name: torch.view_as_real(v) if v.is_complex() else v for name, v in values(module).items()}
    )


def case_accumulation_without_synchronisation() -> None:
    ends = []
    for accumulates in (False, True):
        module, optimizer = made("gloo", Net(), codec="none", warmup="none")
        for step in range(FREEZE + 4):
            optimizer.zero_grad()
            first, second = (words_of(step + 100 * half, dist.get_rank(), 0) for half in (0, 1))
            if accumulates:
                with module.no_sync():
                    loss_of(module, *first).backward()
                loss_of(module, *second).backward()
            else:
                both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
                (2 * loss_of(module, *both)).backward()
            optimizer.step()
        ends.append(module.module)
    assert most_apart(*ends) < 1e-9


def case_clipping_after_the_freeze_is_of_the_momentum() -> None:
    module, optimizer = made("hybridcomp")
    train(module, optimizer, range(FREEZE + 1))
    optimizer.zero_grad()
    loss_of(module, *words_of(FREEZE + 1, dist.get_rank(), 0)).backward()
    new = {p: p.grad.clone() for p in module.parameters() if p.requires_grad}
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    assert float(norm) == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in new.values())), rel=1e-5
    )
    optimizer.step()
    for p, momentum in new.items():
        assert torch.allclose(
            optimizer.state[p]["exp_avg"], momentum * (1e-3 / float(norm)), rtol=1e-3, atol=0
        )


def case_the_warm_up_ends_by_itself_when_the_variance_has_settled() -> None:
    """As the paper has it: once its norm is within 4 % of what it was 1/(1 - beta2) steps before."""
    for backend in BACKENDS:
        module, optimizer = made(backend, freeze_step="auto", betas=(0.9, 0.9), lr=1e-3)
        norms: list[float] = []
        for step in range(300):
            train(module, optimizer, range(step, step + 1), late=0)
            norms.append(
                sum(
                    float(s["exp_avg_sq"].double().sum()) / (1 - 0.9 ** (step + 1))
                    for s in optimizer.state.values()
                )
            )
            settled = len(norms) > 10 and min(norms[-11], norms[-1]) / max(norms[-11], norms[-1]) >= 0.96
            assert optimizer.frozen == settled, (step, norms[-11:])
            if settled:
                break
        assert optimizer.frozen
        assert 10 < step < 299
        train(module, optimizer, range(step + 1, step + 3))
        assert optimizer.frozen


def case_a_hook_that_is_not_there_is_missed() -> None:
    net = Net(torch.float32)
    optimizer = hct.OnebitAdam(p for p in net.parameters() if p.requires_grad)
    loss_of(net, *words_of(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.register\(ddp_model\)"):
        optimizer.step()


def case_what_cannot_be_registered() -> None:
    process_group = group("gloo", dist.get_world_size())
    module = DistributedDataParallel(Net(torch.float32), process_group=process_group)
    trained = [p for p in module.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match=r"lacks scale, down\.bias;"):
        hct.OnebitAdam(
            [p for p in trained if p is not module.module.scale and p is not module.module.down.bias]
        ).register(module)
    with pytest.raises(ValueError, match=r"does not train: one \[7\]"):
        hct.OnebitAdam([*trained, nn.Parameter(torch.ones(7))]).register(module)
    with pytest.raises(TypeError, match=r"not Net: wrap it"):
        hct.OnebitAdam(trained).register(module.module)
    sharded = ZeroRedundancyOptimizer(trained, hct.OnebitAdam, process_group)
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer"):
        sharded.optim.register(module)
    optimizer = hct.OnebitAdam(trained)
    optimizer.register(module)
    with pytest.raises(ValueError, match="registered already"):
        optimizer.register(module)
    with pytest.raises(ValueError, match="add them before DistributedDataParallel"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="communication hook already"):
        hct.OnebitAdam(trained).register(module)
    split = fully_shard(nn.Linear(10, 10))
    with pytest.raises(ValueError, match="compress_fsdp"):
        hct.OnebitAdam(split.parameters())
    another = hct.OnebitAdam(trained)
    with pytest.raises(TypeError, match="compress_fsdp"):
        another.register(split)


def case_options_out_of_range() -> None:
    for name, value, allowed in (
        ("betas", (0.9, 1.0), "from 0 to below 1"),
        ("betas", 0.9, "two numbers"),
        ("lr", -1.0, "not negative"),
        ("eps", math.nan, "finite"),
        ("weight_decay", math.inf, "finite"),
        ("freeze_step", 0, "from 1, or 'auto'"),
        ("freeze_step", 2.5, "whole number"),
        ("freeze_step", "soon", "'auto'"),
        ("codec", "signs", "neither a preset"),
        ("warmup", "int9", "neither a preset"),
    ):
        with pytest.raises(ValueError, match=allowed) as error:
            hct.OnebitAdam([nn.Parameter(torch.ones(3))], **{name: value})
        assert name in str(error.value) or str(value) in str(error.value)

    for name in (
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
        "warmup_steps",
    ):
        with pytest.raises(ValueError, match=f"{name} must be a whole number from"):
            hct.ZeroOneAdam([nn.Parameter(torch.ones(3))], **{name: -1})

    for name, value, allowed in (
        ("min_coeff", 11.0, "not below it"),
        ("factor_min", 0.0, "above 0"),
        ("coeff_beta", 1.0, "below 1"),
        ("factor_threshold", -0.1, "from 0"),
    ):
        with pytest.raises(ValueError, match=f"{name} must .*{allowed}"):
            hct.OnebitLamb([nn.Parameter(torch.ones(3))], **{name: value})


def case_deepspeeds_configuration() -> None:
    """Each name makes its optimizer, with all that DeepSpeed's takes; what has no meaning here is refused by name."""
    common = {"lr": 2e-3, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.01, "bias_correction": True}
    unused = {"cuda_aware": False, "comm_backend_name": "nccl", "amsgrad": False}
    ratios = {"max_coeff": 0.3, "min_coeff": 0.02, "coeff_beta": 0.8}
    factors = {"factor_max": 3.0, "factor_min": 0.4, "factor_threshold": 0.2}
    periods = {"var_update_scaler": 8, "local_step_scaler": 100, "local_step_clipper": 8}
    for name, kind, own in (
        ("OneBitAdam", hct.OnebitAdam, {"freeze_step": 400}),
        ("ZeroOneAdam", hct.ZeroOneAdam, {"var_freeze_step": 300, **periods}),
        ("onebitlamb", hct.OnebitLamb, {"freeze_step": 23_000, **ratios, **factors}),
    ):
        section = {"type": name, "params": common | unused | own}
        for config in ({"train_batch_size": 4, "optimizer": section}, section):
            made_ = hct.deepspeed_optimizer(config, [nn.Parameter(torch.ones(3))], codec="int4")
            assert type(made_) is kind
            group, settings = made_.param_groups[0], made_._settings()
            expected = {key: common[key] for key in ("lr", "eps", "weight_decay")}
            expected |= {"betas": (0.8, 0.99), "bias_correction": False, "decoupled_weight_decay": True}
            assert {key: group[key] for key in expected} == expected
            assert {key: settings[key] for key in own} == own
            assert "int4" in settings["codec"]
    for section, told in (
        ({"type": "AdamW"}, "type must be one of OneBitAdam, ZeroOneAdam, OneBitLamb, not 'AdamW'"),
        ({}, "type must be one of"),
        ({"type": "OneBitAdam", "params": {"amsgrad": True}}, "amsgrad is True"),
        ({"type": "OneBitAdam", "params": {"var_freeze_step": 3}}, "freeze_step, not 'var_freeze_step'"),
        ({"type": "OneBitAdam", "params": {"lr": "auto"}}, "lr is 'auto'"),
    ):
        with pytest.raises(ValueError, match=told):
            hct.deepspeed_optimizer(section, [nn.Parameter(torch.ones(3))])


def case_ranks_with_unlike_settings() -> None:
    late = dist.get_world_size() - 1
    for name, mine, theirs in (
        ("freeze_step", 5, 6),
        ("lr", 1e-3, 1e-2),
        ("codec", "sign", "int4"),
        ("betas", (0.9, 0.99), (0.9, 0.999)),
    ):
        with pytest.raises(ValueError, match=f"{name} is .* on rank 0 and .* on rank {late}"):
            made("gloo", **{name: theirs if dist.get_rank() == late else mine})


def case_steps_that_have_nothing_to_take() -> None:
    module, optimizer = made("gloo")
    train(module, optimizer, range(FREEZE + 1))
    optimizer.zero_grad()
    with module.no_sync():
        loss_of(module, *words_of(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match="under no_sync"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(module, *words_of(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match="no step"):
        module(words_of(0, 0, 0)[0])
    optimizer.zero_grad()
    train(module, optimizer, range(2))
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(loss_of(module, *words_of(0, 0, 0))).backward()
    with pytest.raises(RuntimeError, match="scaler=scaler"):
        scaler.step(optimizer)


def case_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    module, optimizer = made("gloo", nn.Sequential(table, nn.Linear(8, 4)))
    module(torch.arange(9)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients; torch\.optim\.SparseAdam does"):
        optimizer.step()


def case_a_run_that_ends_within_its_warm_up_says_so() -> None:
    for freeze, told in ((100, 1), (2, 0)):
        module, optimizer = made("gloo", freeze_step=freeze)
        train(module, optimizer, range(4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del module, optimizer
            gc.collect()
        found = [
            w for w in caught if "no momentum was compressed, since freeze_step is 100" in str(w.message)
        ]
        assert len(found) == (told if dist.get_rank() == 0 else 0), [str(w.message) for w in caught]


def case_ranks_that_made_unlike_numbers_of_groups() -> None:
    """They are told, where torch gives the group of an exchange another name on one of them; and who does not come."""
    last, mine = dist.get_world_size() - 1, dist.get_rank()
    world = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    if mine == last:
        dist.new_group([mine], backend="gloo", use_local_synchronization=True)
    with pytest.raises(MismatchError, match=rf"rank 0, .* and rank {last} have made unlike numbers"):
        ExchangeGroup(world)
    if mine != last:
        dist.new_group([mine], backend="gloo", use_local_synchronization=True)
    assert ExchangeGroup(world).size == last + 1
    hasty = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    if mine != last:
        with pytest.raises(CollectiveTimeoutError, match=rf"rank {last} did not come within 1 s"):
            ExchangeGroup(hasty)
    dist.barrier(world)


def case_the_papers_rule_in_float64() -> None:
    """The last case, with fewer and fewer ranks: torch names what members alone make by how many groups each has."""
    for ranks in range(1, dist.get_world_size() + 1):
        for backend in BACKENDS:
            group(backend, ranks)
    apart = {}
    for ranks in range(dist.get_world_size(), 0, -1):
        odd = ranks % 2 == 1
        with directly():
            for case in (
                (hct.OnebitAdam, "hybridcomp", ALL, 25),
                (hct.OnebitAdam, "gloo", "sign" if odd else ALL, 0.01),
                (hct.OnebitAdam, "hybridcomp" if odd else "gloo", "none", 0.01 if odd else 25),
                (hct.OnebitLamb, "gloo" if odd else "hybridcomp", ALL, 25 if odd else 0.01),
                (hct.ZeroOneAdam, "gloo" if odd else "hybridcomp", ALL, 0.01 if odd else 25),
            ):
                apart[ranks, *case] = check_rule(case[0], *case[1:2], ranks, *case[2:])
            for codec, cap in ((ALL, 0.01 if odd else 25), ("none", 25)):
                backend = "gloo" if odd == (codec == ALL) else "hybridcomp"
                apart[ranks, "alone", codec] = check_rule_alone(backend, ranks, codec, cap)
    assert max(apart.values()) < 1e-9, apart
