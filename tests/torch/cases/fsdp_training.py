"""Training with compressed FSDP2: feedback, convergence, differences, resume, overflow."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hybridcomp.torch as hct
from tests.torch.models.fsdp import (
    FEEDBACK,
    batch,
    error,
    gathered,
    gradients,
    local_gradients,
    loss_of,
    mesh_of,
    net,
    policy_of,
    same_bits,
    same_everywhere,
    sharded,
    train,
)

BACKENDS = ("hybridcomp", "gloo")


def case_feedback_makes_up_for_what_was_lost() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    steps = 16
    for backend, form in (("hybridcomp", "ef"), ("hybridcomp", "loco"), ("gloo", "ef")):
        text = f'[fsdp]\nreduce_scatter = {{ codec = "int2:block=64", feedback = "{form}" }}\n'
        model = sharded(mesh_of(backend))
        hct.compress_fsdp(model, policy_of(text))
        first = local_gradients(model)
        total = {name: grad.clone() for name, grad in first.items()}
        for _ in range(steps - 1):
            for name, grad in local_gradients(model).items():
                total[name] += grad
        for name in ("0.weight", "2.weight"):
            mine = exact[name].chunk(dist.get_world_size())[dist.get_rank()]
            once, mean = error(first[name], mine), error(total[name] / steps, mine)
            assert mean < 0.35 * once, (backend, form, name, once, mean)


def case_training_converges() -> None:
    whole = net()
    optimizer = torch.optim.Adam(whole.parameters(), lr=3e-3)
    plain = []
    for step in range(100):
        optimizer.zero_grad()
        pairs = [batch(step, rank) for rank in range(dist.get_world_size())]
        loss = torch.stack([((whole(x) - y) ** 2).mean() for x, y in pairs]).mean()
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    for difference in (False, True):
        model = fully_shard(net(), mesh=mesh_of("hybridcomp"))
        hct.compress_fsdp(model, FEEDBACK, difference=difference)
        losses = train(model, torch.optim.Adam(model.parameters(), lr=3e-3), range(100))
        assert plain[-1] < 0.1 * plain[0]
        assert sum(losses[-10:]) < 1.15 * sum(plain[-10:]), (difference, plain[-1], losses[-1])


def case_differences_do_not_keep_errors() -> None:
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        state = hct.compress_fsdp(model, "int4:block=64", difference=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        originals = dict(net().named_parameters())
        for name, value in gathered(model).items():
            assert torch.equal(value, originals[name]), name  # the first values are exact
        train(model, optimizer, range(3))
        before = sum(r.calls for r in state.rows() if r.op == "all_gather")
        loss_of(model).backward()
        after = sum(r.calls for r in state.rows() if r.op == "all_gather")
        once = sum(len(list(m.parameters(recurse=False))) for m in model.modules())
        assert after - before <= once, "parameters travelled in the backward pass"
        weights = gathered(model)
        same_everywhere(weights)
        for name, p in model.named_parameters():
            gap = (weights[name] - p.full_tensor()).abs().max().item()
            step = 0.01 * p.grad.full_tensor().abs().max().item()
            assert gap < 1e-3 + step, (backend, name, gap)


def case_resume_is_bit_identical() -> None:
    for backend in BACKENDS:
        for difference in (False, True):

            def start(mesh, d=difference):
                model = sharded(mesh)
                state = hct.compress_fsdp(model, FEEDBACK, difference=d)
                return model, state, torch.optim.Adam(model.parameters(), lr=3e-3)

            model, state, optimizer = start(mesh_of(backend))
            train(model, optimizer, range(2))
            saved = {k: v.copy() for k, v in state.memory().items()}
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            moments = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, range(2, 4))
            expected = {k: v.full_tensor() for k, v in model.state_dict().items()}

            again, other, optimizer = start(mesh_of(backend))
            again.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            other.load_memory(saved)
            train(again, optimizer, range(2, 4))
            same_bits({k: v.full_tensor() for k, v in again.state_dict().items()}, expected)


def case_state_joins_the_registry() -> None:
    model = sharded(mesh_of("hybridcomp"))
    hct.compress_fsdp(model, FEEDBACK)
    gradients(model)
    mine = {k: v for k, v in hct.state_dict().items() if k.startswith("fsdp:fsdp")}
    assert any("/residual/" in k and "0.weight" in k and v.abs().sum() > 0 for k, v in mine.items()), list(
        mine
    )
    assert any(r.op == "reduce_scatter" and r.axis == "fsdp" for r in hct.stats())


def case_gradient_accumulation() -> None:
    for backend in BACKENDS:
        found = []
        for compress in (False, True):
            model = sharded(mesh_of(backend))
            if compress:
                hct.compress_fsdp(model, FEEDBACK)
            model.set_requires_gradient_sync(False)
            loss_of(model, 0).backward()
            model.set_requires_gradient_sync(True)
            loss_of(model, 1).backward()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        same_everywhere(found[1])
        for name, grad in found[1].items():
            assert error(grad, found[0][name]) < 0.3, (backend, name)


def case_overflow_is_seen_and_forgotten() -> None:
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        hct.compress_fsdp(model, FEEDBACK)
        before = gradients(model)
        loss = loss_of(model)
        (loss * (float("inf") if dist.get_rank() == 0 else 1.0)).backward()
        for name, p in model.named_parameters():
            mine = p.grad.full_tensor()
            assert not torch.isfinite(mine).all(), (backend, name)
        after = gradients(model)
        for name, grad in after.items():
            assert error(grad, before[name]) < 0.5, (backend, name)
