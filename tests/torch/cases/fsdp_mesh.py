"""Compressed FSDP2 over 2-D and changing meshes, gradient scalers, checkpoints; on four ranks."""

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct
from hybridcomp.collectives.stats import since
from tests.torch.models.fsdp import (
    FEEDBACK,
    MINUTE,
    batch,
    error,
    gathered,
    gradients,
    loss_of,
    mesh_of,
    net,
    policy_of,
    same_bits,
    same_everywhere,
    sharded,
    train,
)

HOOK = policy_of('[dp]\nall_reduce = { codec = "int4:block=64", feedback = "ef" }\n')


def case_hybrid_sharding() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    before = {row.key for row in hct.stats()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    mesh["dp"].get_group().comm.policy = policy_of('[dp]\nall_reduce = "int8:block=64"\n')
    model = sharded(mesh)
    state = hct.compress_fsdp(model, FEEDBACK)
    same_everywhere(gathered(model))
    got = gradients(model)
    same_everywhere(got)
    for name, grad in got.items():
        assert error(grad, exact[name]) < 0.3, name
    assert {r.op for r in state.rows() if r.codec != "none"} == {"all_gather", "reduce_scatter"}
    new = [r for r in hct.stats() if r.axis == "dp" and r.key not in before]
    assert any(r.op == "all_reduce" and r.codec == "int8:block=64" for r in new), new


HSDP_EXACT = policy_of('min_bytes = 1\n[dp]\nall_reduce = "exponent"\n')
HSDP = policy_of("""
min_bytes = 256
[fsdp]
codec = "int8:block=64"
between_hosts = true
[dp]
all_reduce = { codec = "int4:block=64", feedback = "ef" }
""")


def hybrid_mesh(backend: str) -> DeviceMesh:
    """Return a mesh of two replicas of two shards, in groups of a backend."""
    rank = dist.get_rank()
    rows = [
        [dist.new_group(ranks, backend=backend) for ranks in pairs]
        for pairs in (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    ]
    groups = [rows[0][rank % 2], rows[1][rank // 2]]
    return DeviceMesh.from_group(
        groups, "cpu", mesh=torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "fsdp")
    )


def case_replicas_are_compressed_on_every_backend() -> None:
    """Their gradients travel by the section for replicas, with feedback; the shards of one host stay as they are."""
    exact = gradients(sharded(mesh_of("gloo")))
    for backend in ("hybridcomp", "gloo"):
        model = sharded(hybrid_mesh(backend))
        state = hct.compress_fsdp(model, HSDP)
        before = {row.key: row.calls for row in hct.stats()}
        total = dict.fromkeys(exact, 0.0)
        first = None
        for _ in range(24):
            model.zero_grad()
            got = gradients(model)
            same_everywhere(got)
            total = {name: total[name] + grad for name, grad in got.items()}
            first = first or got
        assert not [r for r in state.rows() if r.codec != "none"]
        new = [r for r in hct.stats() if r.axis == "dp" and r.calls > before.get(r.key, 0)]
        assert any(r.op == "all_reduce" and r.codec == "int4:block=64" for r in new), new
        for name, grad in exact.items():
            if grad.dim() == 2:
                lone, mean = error(first[name], grad), error(total[name] / 24, grad)
                assert 0 < lone < 0.3, (backend, name, lone)
                assert mean < lone / 3, (backend, name, lone, mean)


def case_replicas_keep_what_accumulates_and_the_divisor() -> None:
    """Steps without the replicas' all-reduce, a divisor of the program's own, and a hook behind it: as without us."""
    found = []
    for policy in (None, HSDP_EXACT):
        model = sharded(hybrid_mesh("hybridcomp"))  # gloo has no sum with a factor
        seen = []
        for module in (model[0], model[2], model[4], model):
            module.set_gradient_divide_factor(8.0)
            module.set_all_reduce_hook(lambda output, seen=seen: seen.append(output.numel()))
        if policy is not None:
            hct.compress_fsdp(model, policy)
        model.set_requires_all_reduce(False)
        loss_of(model, 1).backward()
        model.set_requires_all_reduce(True)
        loss_of(model, 2).backward()
        assert seen
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert error(found[1][name], grad) < 1e-5, name


def case_smaller_mesh_after_forward() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    for backend in ("hybridcomp", "gloo"):
        model = net()
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, mesh=mesh_of(backend), reshard_after_forward=2)
        fully_shard(model, mesh=mesh_of(backend))
        state = hct.compress_fsdp(model, FEEDBACK)
        got = gradients(model)
        same_everywhere(got)
        for name, grad in got.items():
            assert error(grad, exact[name]) < 0.3, (backend, name)
        assert any("smaller mesh" in r.reason for r in state.rows())


def case_scaler_skips_everywhere() -> None:
    model = sharded(mesh_of("hybridcomp"))
    hct.compress_fsdp(model, FEEDBACK)
    hook = DistributedDataParallel(net(), process_group=mesh_of("hybridcomp", name="dp").get_group())
    hook.register_comm_hook(hct.HookState(HOOK, module=hook), hct.comm_hook)
    for kind in (model, hook):
        optimizer = torch.optim.SGD(kind.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(4):
            before = [p.detach().clone() for p in kind.parameters()]
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(kind, step))
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            same = [torch.equal(a, b) for a, b in zip(before, kind.parameters(), strict=True)]
            assert all(same) if step == 2 else not any(same), (type(kind), step, same)
            assert scaler.get_scale() == (4.0 if step < 2 else 2.0)
        assert all(torch.isfinite(p.detach()).all() for p in kind.parameters())


def case_scaler_hears_of_one_ranks_shard() -> None:
    """An overflow in rows that one rank owns is an overflow to all."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(48, 8), mesh=mesh_of("hybridcomp"))
    hct.compress_fsdp(
        model, policy_of('[fsdp]\nreduce_scatter = { codec = "int8:block=64", feedback = "ef" }\n')
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    before = [p.detach().full_tensor() for p in model.parameters()]
    out = model(batch()[0])
    factor = torch.ones(8)
    if dist.get_rank() == 1:
        factor[7] = float("inf")  # a row of rank 3's
    scaler.scale((out * factor).sum()).backward()
    local = model.weight.grad.to_local()
    assert torch.isfinite(local).all() == (dist.get_rank() < 3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach().full_tensor(), old)


def _train_on(mesh, steps: range, losses: list[float] | None = None, start=None):
    """Train a compressed model on a mesh; global batches are those of four ranks however many there are."""
    model = sharded(mesh)
    state = hct.compress_fsdp(model, FEEDBACK)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if start is not None:
        start(model, optimizer, state)
    for step in steps:
        optimizer.zero_grad()
        loss = _share_of_loss(model, step, mesh.size(), mesh.get_local_rank())
        loss.backward()
        optimizer.step()
        if losses is not None:
            losses.append(loss.item())
    return model, state, optimizer


def _share_of_loss(model, step: int, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's part of the mean over the global batch of 48 rows."""
    x, y = (torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(4)), strict=True))
    mine = slice(rank * 48 // ranks, (rank + 1) * 48 // ranks)
    return ((model(x[mine]).float() - y[mine]) ** 2).mean()


def _folder() -> str:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def case_checkpoint_and_restart_with_four_and_with_three_ranks() -> None:
    mesh = mesh_of("hybridcomp")
    model, state, optimizer = _train_on(mesh, range(4))
    folder = _folder()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    mine = {f"{state.label}/{k}": torch.from_numpy(v.copy()) for k, v in state.memory().items()}
    states = [None] * 4
    dist.all_gather_object(states, mine)

    def load(ranks: int, group=None):
        def start(model, optimizer, state) -> None:
            weights, moments = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder, process_group=group)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            parts = states if ranks == 4 else hct.reshard_state(states, ranks)
            arrays = {k.partition("/")[2]: v.numpy() for k, v in parts[dist.get_rank()].items()}
            state.load_memory(arrays)

        return start

    for step in range(4, 10):
        optimizer.zero_grad()
        _share_of_loss(model, step, 4, dist.get_rank()).backward()
        optimizer.step()
    expected = {k: v.full_tensor() for k, v in model.state_dict().items()}
    again, _, _ = _train_on(mesh_of("hybridcomp"), range(4, 10), start=load(4))
    same_bits({k: v.full_tensor() for k, v in again.state_dict().items()}, expected)

    three = mesh_of("hybridcomp", [0, 1, 2])
    if dist.get_rank() < 3:
        again, _, _ = _train_on(three, range(4, 10), start=load(3, three.get_group()))
        moved = {k: error(v, net().state_dict()[k]) for k, v in expected.items()}
        for name, value in again.state_dict().items():
            gap = error(value.full_tensor(), expected[name])
            assert gap < 0.15 * moved[name], (name, gap, moved[name])


def case_what_was_not_sent_is_carried_to_other_ranks() -> None:
    """The sum of gradients of both runs, and of what they still keep, is that of the exact ones."""
    policy = policy_of(
        '[fsdp]\nreduce_scatter = { codec = "int2:block=64", feedback = "FORM" }\n'.replace("FORM", "ef")
    )
    mesh = mesh_of("hybridcomp")
    model = sharded(mesh)
    state = hct.compress_fsdp(model, policy)
    for _ in range(3):
        gradients(model)
    states = [None] * 4
    mine = {f"{state.label}/{k}": torch.from_numpy(v.copy()) for k, v in state.memory().items()}
    dist.all_gather_object(states, mine)
    three = mesh_of("hybridcomp", [0, 1, 2])
    if dist.get_rank() == 3:
        return
    kept = _residuals(states)
    resharded = hct.reshard_state(states, 3)
    for name, total in _residuals(resharded).items():
        assert torch.allclose(total, kept[name], atol=1e-6), name
    model = sharded(three)
    state = hct.compress_fsdp(model, policy)
    with pytest.warns(UserWarning, match="begins anew on 3"):
        state.load_memory({k.partition("/")[2]: v.numpy() for k, v in states[dist.get_rank()].items()})
    state.load_memory({k.partition("/")[2]: v.numpy() for k, v in resharded[dist.get_rank()].items()})
    again = state.memory()
    for key, value in resharded[dist.get_rank()].items():
        name = key.partition("/")[2]
        assert name.startswith("ranks/") or (again[name] == value.numpy()).all(), name  # nothing is sent yet
    exact = sharded(three)
    loss_of(exact, 5).backward()
    loss_of(model, 5).backward()
    after = [None] * 3
    mine = {f"{state.label}/{k}": torch.from_numpy(v.copy()) for k, v in state.memory().items()}
    dist.all_gather_object(after, mine, group=three.get_group())
    left = _residuals(after)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        sent = 3 * p.grad.full_tensor().flatten() + left[name] - kept[name]
        assert error(sent, 3 * q.grad.full_tensor().flatten()) < 1e-4, name


def _residuals(states) -> dict[str, torch.Tensor]:
    """Return the sum over ranks of what they keep, by parameter."""
    totals: dict[str, torch.Tensor] = {}
    for state in states:
        for key, value in state.items():
            if "/residual/" in key and "#" not in key:
                name = key.split('"')[3]
                totals[name] = totals.get(name, 0) + value
    return totals


def case_hook_restarts_with_three_ranks() -> None:
    def start(mesh):
        ddp = DistributedDataParallel(net(), process_group=mesh.get_group())
        state = hct.HookState(HOOK, module=ddp)
        ddp.register_comm_hook(state, hct.comm_hook)
        return ddp, state, torch.optim.Adam(ddp.parameters(), lr=3e-3)

    def run(ddp, optimizer, mesh, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            _share_of_loss(ddp, step, mesh.size(), mesh.get_local_rank()).backward()
            optimizer.step()

    four, three = mesh_of("hybridcomp", name="dp"), mesh_of("hybridcomp", [0, 1, 2], name="dp")
    ddp, state, optimizer = start(four)
    run(ddp, optimizer, four, range(8))
    weights, moments = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    mine = {f"hook:dp/{k}": torch.from_numpy(v.copy()) for k, v in state.memory().items()}
    states = [None] * 4
    dist.all_gather_object(states, mine)
    run(ddp, optimizer, four, range(8, 16))
    if dist.get_rank() < 3:
        again, state, optimizer = start(three)
        again.module.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        resharded = hct.reshard_state(states, 3)
        state.load_memory({k.partition("/")[2]: v.numpy() for k, v in resharded[dist.get_rank()].items()})
        run(again, optimizer, three, range(8, 16))
        for name, value in again.module.state_dict().items():
            moved = error(ddp.module.state_dict()[name], net().state_dict()[name])
            gap = error(value, ddp.module.state_dict()[name])
            assert gap < 0.15 * moved, (name, gap, moved)


def case_training_on_a_2d_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    model = sharded(mesh)
    hct.compress_fsdp(model, FEEDBACK, difference=True)
    losses = train(model, torch.optim.Adam(model.parameters(), lr=3e-3), range(12))
    assert losses[-1] < 0.9 * losses[0]
    same_everywhere({name: p.full_tensor() for name, p in model.named_parameters()})


def case_each_byte_leaves_a_host_once() -> None:
    """Two hosts of two ranks: in a step 1.5 times the parameters' bytes leave a host, as the codec makes them."""
    os.environ["HYBRIDCOMP_HOSTS"] = "2x2"
    try:
        options = hct.Options(policy="none", axis="fsdp")
        group = dist.new_group(backend="hybridcomp", timeout=MINUTE, pg_options=options)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",))
        for codec, least in ("none", 1.5), ("int8:block=128", 1.5 * (8.25 / 32)):
            times = _times_that_leave(mesh, group, codec)
            assert 0.99 * least < times < 1.03 * least, (codec, times, least)
    finally:
        del os.environ["HYBRIDCOMP_HOSTS"]


def _times_that_leave(mesh: DeviceMesh, group, codec: str) -> float:
    """Return the bytes that leave a host in a step, over those of the parameters."""
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(3)))
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    counted = group if codec == "none" else hct.compress_fsdp(model, f"{codec}:min_bytes=0")
    before = [row.copy() for row in counted.rows()]
    model(torch.randn(4, 192)).square().mean().backward()
    rows = since(before, counted.rows())
    assert {row.op for row in rows} == {"all_gather", "reduce_scatter"}, rows
    left = torch.tensor(sum(row.between_bytes for row in rows))
    dist.all_reduce(left)
    return left.item() / 2 / nbytes
