"""LocalSGD and DiLoCo over hybridcomp and over gloo, against the rule on one process."""

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp import trace
from tests.torch.cases.hook import BACKENDS, group, policy
from tests.torch.models.replicas import (
    LR,
    MOMENTUM,
    WIDTH,
    adam,
    agreed,
    assert_close,
    assert_same_everywhere,
    inner_step,
    net,
    rule,
    train,
    values,
)


def case_diloco_is_its_rule() -> None:
    every_name = list(values(net()))
    halves = [every_name[:2], every_name[2:]]
    cases: list[tuple[int, list[list[str]], dict[str, Any]]] = [
        (4, [every_name], {}),
        (4, halves, {"fragments": 2}),
        (5, halves, {"fragments": 2, "fragment_sync_delay": 3, "fragment_sync_order": "paper"}),
        (6, halves, {"fragments": 2, "fragment_sync_delay": 2}),
        (5, [every_name], {"fragment_sync_delay": 2, "fragment_update_alpha": 0.25}),
        (
            5,
            [every_name],
            {"fragment_sync_delay": 2, "fragment_update_alpha": 0.25, "fragment_sync_order": "paper"},
        ),
    ]
    for every, parts, more in cases:
        delay, alpha = more.get("fragment_sync_delay", 0), more.get("fragment_update_alpha", 0.0)
        order = more.get("fragment_sync_order", "torchft")
        expected = rule(dist.get_world_size(), 13, every, parts, delay, alpha, order)
        for backend in BACKENDS:
            model = net()
            inner = adam(model)
            context = hct.DiLoCo(
                model, inner, every=every, policy="none", process_group=group(backend), **more
            )
            with context:
                train(model, inner, range(1, 14))
                got = [values(model), agreed(context)]
            assert_close(got[0], expected[dist.get_rank()], 1e-9)
            assert_close(got[1], expected[-1], 1e-9)


def case_local_sgd_is_the_mean_of_parameters() -> None:
    ranks = dist.get_world_size()
    models = [net() for _ in range(ranks)]
    optimizers = [adam(model) for model in models]
    for t in range(1, 8):
        for rank in range(ranks):
            inner_step(models[rank], optimizers[rank], rank, t)
        if t % 3 == 0:
            mean = {
                name: torch.stack([values(m)[name] for m in models]).mean(0) for name in values(models[0])
            }
            for each in models:
                each.load_state_dict(mean)
    model = net()
    optimizer = adam(model)
    with hct.LocalSGD(model, every=3, policy="none"):  # which finds the optimizer
        other = nn.Linear(2, 2)
        torch.optim.SGD(other.parameters()).step()  # the optimizer of another model
        train(model, optimizer, range(1, 8))
    assert_close(values(model), values(models[dist.get_rank()]), 1e-9)
    last = values(model)
    train(model, optimizer, range(8, 10))  # outside of it, no step counts
    assert not torch.equal(values(model)["0.weight"], last["0.weight"])
    assert len({tensor.sum().item() for tensor in MPI.COMM_WORLD.allgather(values(model)["0.weight"])}) > 1


def case_several_optimizers_of_a_model() -> None:
    model = net()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
    with hct.LocalSGD(model, every=1, policy="none"):
        first.step()
        with pytest.raises(ValueError, match="give optimizer= the one that steps last"):
            second.step()


def case_all_ranks_have_the_same_bits_after_each_outer_step() -> None:
    chosen = policy("int4:block=128", feedback=True, min_bytes=1024)
    for backend in BACKENDS:
        for kind in (hct.DiLoCo, hct.LocalSGD):
            model = net(torch.float32)
            inner = adam(model)
            with kind(model, inner, every=2, policy=chosen, process_group=group(backend)) as context:
                for step in range(1, 9):
                    train(model, inner, range(step, step + 1))
                    if step % 2 == 0:
                        assert_same_everywhere(values(model))
                    else:
                        assert len(set(MPI.COMM_WORLD.allgather(values(model)["0.weight"].sum().item()))) > 1
                    assert_same_everywhere(agreed(context))
            saved = hct.state_dict()
            assert any(key.startswith("sync:dp") and "residual" in key for key in saved), saved.keys()
    rows = [row for row in hct.stats() if row.codec == "int4:block=128" and row.axis == "dp"]
    assert rows
    assert sum(row.wire_bytes for row in rows) < 0.2 * sum(row.plain_bytes for row in rows)


def case_feedback_makes_up_for_what_was_lost() -> None:
    """With constant steps the global parameters stay near the exact ones; without feedback they fall back."""
    errors = {}
    for feedback in (False, True):
        model = net(torch.float32)
        inner = torch.optim.SGD(model.parameters(), lr=1e-2)
        start = values(model)
        drift = {
            name: torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank()))
            for name, p in model.named_parameters()
        }
        chosen = policy("int4:block=128", feedback, min_bytes=1024)
        with hct.LocalSGD(model, inner, every=1, policy=chosen) as context:
            for _ in range(20):
                for name, p in model.named_parameters():
                    p.grad = drift[name].clone()
                inner.step()
            got = agreed(context)["0.weight"] - start["0.weight"]
        mean = sum(MPI.COMM_WORLD.allgather(drift["0.weight"])) / dist.get_world_size()
        errors[feedback] = ((got + 20 * 1e-2 * mean).norm() / (20 * 1e-2 * mean).norm()).item()
    assert errors[True] < 0.5 * errors[False], errors


def case_resumes_with_the_same_bits() -> None:
    """Saved while one fragment is under way, and while none is."""
    chosen = policy("int4:block=128", feedback=True, min_bytes=1024)
    for backend, order, stop, waits in (
        *((backend, "paper", stop, stop == 6) for backend in BACKENDS for stop in (6, 7)),
        *((BACKENDS[0], "torchft", stop, stop == 5) for stop in (5, 6)),
    ):
        more: dict[str, Any] = {"every": 4, "fragments": 2, "fragment_sync_delay": 1, "policy": chosen}
        more["fragment_sync_order"] = order

        def made() -> tuple[nn.Module, torch.optim.Optimizer, hct.DiLoCo]:
            model = net(torch.float32)
            inner = adam(model)
            return model, inner, hct.DiLoCo(model, inner, process_group=group(backend), **more)  # noqa: B023

        model, inner, context = made()
        with context:
            train(model, inner, range(1, stop + 1))
            saved = copy.deepcopy((model.state_dict(), inner.state_dict()))
            ours, memory = context.state_dict(), context._sync._averager.memory()
            assert bool(ours["arrived"]) == waits
            train(model, inner, range(stop + 1, 13))
            expected = values(model) | agreed(context)
        again, inner_again, resumed = made()
        again.load_state_dict(saved[0])
        inner_again.load_state_dict(saved[1])
        resumed.load_state_dict(ours)
        resumed._sync._averager.load_memory(memory)
        with resumed:
            train(again, inner_again, range(stop + 1, 13))
            got = values(again) | agreed(resumed)
        assert all(torch.equal(got[name], expected[name]) for name in expected), (backend, stop)


def case_going_back_drops_what_is_under_way() -> None:
    """The last replica is late for an average that the others have under way when they load an earlier state."""
    model = net()
    inner = adam(model)
    late: dict[str, Any] = {"fragment_sync_delay": 3, "fragment_sync_order": "paper"}
    with hct.DiLoCo(model, inner, every=4, policy="none", **late) as context:
        train(model, inner, range(1, 6))  # the average of step 4 is under way until step 7
        saved = copy.deepcopy((context.state_dict(), model.state_dict(), inner.state_dict()))
        train(model, inner, range(6, 8))
        expected = values(model)
        MPI.COMM_WORLD.Barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.5)
        train(model, inner, range(8, 9))  # starts one
        for what, state in zip((context, model, inner), saved, strict=True):
            what.load_state_dict(state)
        train(model, inner, range(6, 8))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in values(model).items())
    assert_same_everywhere(values(model))


def case_an_outer_optimizer_of_ones_own() -> None:
    """Any optimizer of torch's, with its groups and its schedule; the fragments are modules."""
    model = net()
    inner = adam(model)
    outer = torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}], lr=1e-2
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(outer, factor=0.5, total_iters=100)
    with hct.DiLoCo(model, inner, outer, every=2, fragments=[model[2], model[0]], policy="none") as context:
        start = agreed(context)
        train(model, inner, range(1, 5))
        moved = {name: (tensor - start[name]).abs().max().item() for name, tensor in agreed(context).items()}
    assert moved["2.weight"] == 0
    assert moved["0.weight"] == pytest.approx(
        2 * 0.5 * 1e-2, rel=1e-2
    )  # Adam's first steps are as long as the rate
    assert schedule.get_last_lr() == [0.005, 0.0]
    assert {len(p.shape) for p in outer.state} == {1, 2}
    assert_same_everywhere({name: p for name, p in values(model).items() if name.startswith("0")})


def case_half_precision_frozen_and_unused_parameters() -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = net(torch.bfloat16), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Some()
    inner = adam(model)
    before = values(model)
    with hct.DiLoCo(model, inner, every=2, fragments=2, policy="none") as context:
        assert not any(name.startswith("frozen") for name in agreed(context))
        train(model, inner, range(1, 7))
        whole = agreed(context)
    after = values(model)
    assert all(torch.equal(after[n], before[n]) for n in after if not n.startswith("used"))
    assert whole["used.0.weight"].dtype is torch.float32
    assert after["used.2.weight"].dtype is torch.bfloat16
    assert torch.equal(after["used.2.weight"], whole["used.2.weight"].bfloat16())  # the last fragment's
    assert not torch.equal(whole["used.2.weight"], whole["used.2.weight"].bfloat16().float())
    assert_same_everywhere(whole)


class Turned(nn.Module):
    """A real layer of an odd number of parameters, a complex one, and one of wider numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.real = nn.Linear(5, 5, bias=False)
        self.turn = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.complex128).conj())  # not conjugated in memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.real(x).to(torch.complex64) @ self.turn
        return (turned.real + 2 * turned.imag).square().mean() + ((self.wide * x[0, 0]).abs() ** 2).mean()


def case_complex_parameters() -> None:
    """They are averaged as pairs of reals, and outer optimizers have them as complex numbers."""
    ranks = range(dist.get_world_size())
    inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) for rank in ranks]

    def steps(model: nn.Module, rank: int, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs[rank]).backward()
            optimizer.step()

    def mean(models: list[nn.Module]) -> dict[str, torch.Tensor]:
        every = [dict(model.named_parameters()) for model in models]
        return {name: (sum(each[name] for each in every) / len(every)).detach() for name in every[0]}

    apart = [Turned() for _ in ranks]
    for rank in ranks:
        steps(apart[rank], rank, 2)
    want, first = mean(apart), dict(Turned().named_parameters())
    for backend in BACKENDS:
        for codec, most in (("none", 1e-5), ("int8", 0.02)):
            for outer in (None, 0.5):
                model = Turned()
                inner = torch.optim.SGD(model.parameters(), lr=0.01)
                more: dict[str, Any] = {
                    "every": 2,
                    "policy": policy(codec, feedback=codec != "none", min_bytes=0),
                    "process_group": group(backend),
                }
                if outer is None:
                    context: Any = hct.LocalSGD(model, inner, **more)
                else:
                    more["outer"] = torch.optim.SGD(model.parameters(), lr=outer)
                    context = hct.DiLoCo(model, inner, **more)
                with context:
                    for _ in range(2):
                        inner.zero_grad()
                        model(inputs[dist.get_rank()]).backward()
                        inner.step()
                    got = values(model)
                assert_same_everywhere(got)
                for name, value in got.items():
                    moved = (want[name] - first[name]) * (outer or 1)
                    assert value.dtype == first[name].dtype
                    off = (value - first[name] - moved).abs().max() / moved.abs().max()
                    assert off < most, (backend, codec, outer, name, off)
                saved = context.state_dict()
                context.load_state_dict(saved)
                assert saved["globals"]["turn"].is_complex()


def case_parts_of_dtensors() -> None:
    """Replicas of tensor-parallel ranks average their parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    plain, split = net(torch.float32), net(torch.float32)
    parallelize_module(split, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for model in (plain, split):
        inner = adam(model)
        with hct.DiLoCo(
            model, inner, every=2, policy="int8:min_bytes=0", process_group=mesh["dp"].get_group()
        ):
            train(model, inner, range(1, 5))
    for name, p in split.named_parameters():
        assert (p.detach().full_tensor() - plain.get_parameter(name)).abs().max() < 1e-4, name


def case_one_replica() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = net()
    inner = adam(model)
    with hct.DiLoCo(model, inner, every=2, process_group=alone) as context:
        train(model, inner, range(1, 3))
        whole = agreed(context)
    start, end = values(net()), net()
    train(end, adam(end), range(1, 3))
    for name, tensor in values(end).items():
        # Nesterov's first step is 1 + momentum times as long.
        assert torch.allclose(
            whole[name], start[name] + LR * (1 + MOMENTUM) * (tensor - start[name]), atol=1e-12
        )


def case_replicas_begin_alike() -> None:
    model = nn.Sequential(net(torch.float32, seed=dist.get_rank()), nn.BatchNorm1d(WIDTH))
    model[1].running_mean += dist.get_rank()
    model[0][0].weight.data = model[0][0].weight.data.t().contiguous().t()  # not contiguous
    expected = MPI.COMM_WORLD.bcast(model.state_dict())
    with hct.LocalSGD(model, every=2) as context:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        with pytest.raises(RuntimeError, match="entered already"):
            context.__enter__()
    assert torch.equal(agreed(context)["0.0.weight"], expected["0.0.weight"])
    mine = net(torch.float32, seed=dist.get_rank())
    with hct.LocalSGD(mine, every=2, init_sync=False):
        assert torch.equal(mine[0].weight, net(torch.float32, seed=dist.get_rank())[0].weight)


def case_average_ends_with_one_model() -> None:
    model = net()
    inner = adam(model)
    late: dict[str, Any] = {
        "every": 4,
        "fragments": 2,
        "fragment_sync_delay": 1,
        "fragment_sync_order": "paper",
    }
    with hct.DiLoCo(model, inner, policy="none", **late) as context:
        train(model, inner, range(1, 7))
        assert set(context.state_dict()["arrived"]) == {"0.weight", "0.bias"}
        context._sync.finish()
        mine = values(model)
        context.average()
        assert not context.state_dict()["arrived"]
    mean = {name: torch.stack(MPI.COMM_WORLD.allgather(tensor)).mean(0) for name, tensor in mine.items()}
    assert_close(values(model), mean, 1e-12)
    assert_same_everywhere(values(model))
    with hct.DiLoCo(model, inner, policy="none", **late) as again:
        state = context.state_dict()
        again.load_state_dict(state)  # nothing is under way after step 6, where something would be
        train(model, inner, range(7, 9))


def case_average_has_what_has_changed_since_the_last_step() -> None:
    """Average within the context, where the last step has just averaged, and after it."""
    ranks = dist.get_world_size()
    mean = (2**ranks - 1) / ranks  # no rank's own
    for kind in (hct.LocalSGD, hct.DiLoCo):
        model = net()
        inner = adam(model)
        context = kind(model, inner, every=2, policy="none")
        with pytest.raises(RuntimeError, match="before its first with, which gives all replicas rank 0's"):
            context.average()
        with context:
            train(model, inner, range(1, 3))
            before = values(model)
            model[0].bias.data += 2 ** dist.get_rank()
            context.average()
            assert_close(values(model), before | {"0.bias": before["0.bias"] + mean}, 1e-12)
            assert_same_everywhere(values(model))
        train(model, inner, range(3, 4))
        assert len(set(MPI.COMM_WORLD.allgather(values(model)["0.weight"].sum().item()))) > 1
        context.average()
        assert_same_everywhere(values(model) | agreed(context))
    alike = net()
    hct.LocalSGD(alike, every=2, policy="none", init_sync=False).average()
    assert_close(values(alike), values(net()), 1e-12)


def case_leaving_ends_what_is_under_way() -> None:
    """By the paper's order; by torchft's it is due later, when the context is entered again."""
    for order, ends in (("paper", 4), ("torchft", 6)):
        for error in (None, KeyError):
            model = net()
            inner = adam(model)
            more: dict[str, Any] = {"every": 4, "fragment_sync_delay": 2, "fragment_sync_order": order}
            context = hct.DiLoCo(model, inner, policy="none", **more)
            try:
                with context:
                    train(model, inner, range(1, ends + 1))
                    if error is not None:
                        raise error
            except KeyError:
                pass
            assert bool(context.state_dict()["arrived"]) == (error is not None or order == "torchft")
    whole = net()
    inner = adam(whole)
    with hct.DiLoCo(whole, inner, policy="none", **more):
        train(whole, inner, range(1, 9))
    with context:
        train(model, context._optimizer, range(7, 9))
    assert all(torch.equal(tensor, values(whole)[name]) for name, tensor in values(model).items())


class Manager:
    """A manager of torchft that all replicas of the default group share, and that none of them leaves."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self._step = 0

    def current_step(self) -> int:
        return self._step

    def start_quorum(self) -> None: ...

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> dist.Work:
        tensor /= dist.get_world_size()
        return dist.all_reduce(tensor, group=group("gloo"), async_op=True)

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def register_state_dict_fn(self, *_: object) -> None: ...


def case_diloco_is_torchfts() -> None:
    """As torchft's own class has it, after every step: a program that moves from there trains as before."""
    from torchft import local_sgd

    cases: list[tuple[int, int, int, float]] = [
        (4, 1, 0, 0.0),
        (4, 1, 3, 0.0),
        (6, 2, 2, 0.0),
        (6, 2, 1, 0.25),
    ]
    for every, fragments, delay, alpha in cases:
        ours, theirs = net(torch.float32), net(torch.float32)
        parts = {"ours": [ours], "theirs": [theirs]}
        if fragments == 2:
            parts = {"ours": [ours[0], ours[2]], "theirs": [theirs[0], theirs[2]]}
        inner, inner_theirs = adam(ours), adam(theirs)
        more: dict[str, Any] = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        # One for each part: torchft's step of one for all takes the other parts' gradients for differences.
        outer = [
            torch.optim.SGD(part.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
            for part in parts["theirs"]
        ]
        reference = local_sgd.DiLoCo(
            Manager(), parts["theirs"], inner_theirs, outer, sync_every=every, **more
        )
        context = hct.DiLoCo(ours, inner, every=every, fragments=parts["ours"], policy="none", **more)
        for begin, end in ((1, 2 * every), (2 * every, 3 * every + 1)):  # leave it once before an outer step
            with context, reference:
                for step in range(begin, end):
                    train(ours, inner, range(step, step + 1))
                    train(theirs, inner_theirs, range(step, step + 1))
                    assert_close(values(ours), values(theirs), 1e-6)
            assert_close(values(ours), values(theirs), 1e-6)


def case_local_sgd_is_torchfts() -> None:
    from torchft import local_sgd

    ours, theirs = net(torch.float32), net(torch.float32)
    inner, inner_theirs = adam(ours), adam(theirs)
    with (
        hct.LocalSGD(ours, inner, every=3, policy="none"),
        local_sgd.LocalSGD(Manager(), theirs, inner_theirs, sync_every=3),
    ):
        for step in range(1, 8):
            train(ours, inner, range(step, step + 1))
            train(theirs, inner_theirs, range(step, step + 1))
            assert_close(values(ours), values(theirs), 1e-6)


def case_values_that_are_not_finite_are_told_to_all() -> None:
    model = net(torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with hct.LocalSGD(model, inner, every=1, policy=policy("int4:block=128", True, min_bytes=1024)):
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.inf if dist.get_rank() == 1 else 0.0)
        inner.step()
    assert not torch.isfinite(model[0].weight).any()
    assert_same_everywhere({name: torch.isfinite(p).view(torch.uint8) for name, p in values(model).items()})


def case_outer_steps_are_no_steps_of_a_trace() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = net()
    inner = adam(model)
    context = hct.DiLoCo(model, inner, every=2, process_group=alone)
    with mock.patch.object(trace, "recorder") as recorder, context:
        train(model, inner, range(1, 5))
    assert recorder.step.call_count == 4


def case_a_late_replica_is_told() -> None:
    """Have those that wait name the late replica; what it starts then fails at once."""
    ours = dist.new_group(timeout=timedelta(seconds=30))
    last = dist.get_world_size() - 1

    def told(run: Callable[[], None]) -> hc.HybridcompError:
        with pytest.raises(hc.HybridcompError) as caught:
            run()
        return caught.value

    model = net()
    inner = adam(model)
    more: dict[str, Any] = {"every": 2, "fragment_sync_delay": 1, "fragment_sync_order": "paper"}
    context = hct.DiLoCo(model, inner, policy="int8:min_bytes=0", process_group=ours, **more)
    with context:
        train(model, inner, range(1, 4))  # makes the communicator
        earlier = context.state_dict()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), ours)
        before = values(model)
        if dist.get_rank() == last:
            MPI.COMM_WORLD.Barrier()
            began = time.monotonic()
            error = told(lambda: train(model, inner, range(4, 6)))
            assert time.monotonic() - began < 10
        else:
            error = told(lambda: train(model, inner, range(4, 6)))
            assert isinstance(error, hc.CollectiveTimeoutError), error
            assert f"rank {last}" in str(error), error
            assert "all_reduce" in str(error), error
            MPI.COMM_WORLD.Barrier()
        assert not torch.equal(values(model)["0.weight"], before["0.weight"])  # steps went on to the update
        context.load_state_dict(earlier)  # drops the average, which will never come
        assert not context.state_dict()["arrived"]
