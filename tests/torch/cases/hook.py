"""The DDP hook over hybridcomp and over gloo; the default group is hybridcomp's."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.torch.hook.averager import parameter_names
from tests.torch.models.ddp import (
    WIDTH,
    assert_near,
    batch,
    loss_of,
    model,
    reference_gradients,
    relative_error,
)
from tests.torch.models.parallel import assert_errors_within, assert_same_on_all_ranks

LOSSY = {
    "int8:block=128": (1e-3, 2e-2),
    "int4:block=128": (1e-2, 0.3),
    "topk:ratio=0.1": (0.1, 0.95),
    "powersgd:rank=4": (1e-2, 0.95),
    "lattice:bits=8": (1e-3, 0.1),
    "randomblock:ratio=0.6": (0.1, 0.95),
    "sketch": (0, 2e-6),
    "sketch:index=bloom:density=1": (0, 2e-6),
}
_groups: dict[str, dist.ProcessGroup] = {}


def group(backend: str) -> dist.ProcessGroup:
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


BACKENDS = ("hybridcomp", "gloo")


@contextmanager
def directly() -> Iterator[None]:
    """Let hooks whose first bucket comes in here take the algorithm that all links have."""
    with mock.patch.dict(os.environ, {"HYBRIDCOMP_ALGORITHM": "all_reduce=direct"}):
        yield


def policy(codec: str, feedback: bool | str = False, **more: object) -> str:
    """Return a policy file; ``more`` are keys of the top level. ``feedback`` is a form, or True for ``ef``."""
    form = "ef" if feedback is True else feedback
    of_codec = ("warmup_steps", "between_hosts")
    lines = [f"{key} = {value!r}" for key, value in more.items() if key not in of_codec]
    entry = [f'codec = "{codec}"'] + ([f'feedback = "{form}"'] if form else [])
    entry += [f"{key} = {str(more[key]).lower()}" for key in of_codec if key in more]
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write("\n".join([*lines, "[dp]", f"all_reduce = {{ {', '.join(entry)} }}"]))
    return file.name


def hooked(backend: str, chosen: str, net: nn.Module | None = None, **kwargs) -> DistributedDataParallel:
    ddp = DistributedDataParallel(net or model(), process_group=group(backend), **kwargs)
    ddp.state = hct.HookState(chosen, module=ddp)
    ddp.register_comm_hook(ddp.state, hct.comm_hook)
    return ddp


def step(ddp: DistributedDataParallel, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return gradients of the mean loss over the whole batch, times ``scale``."""
    dtype = next(ddp.parameters()).dtype
    x, y = (t.chunk(dist.get_world_size())[dist.get_rank()].to(dtype) for t in batch(60))
    ddp.zero_grad()
    (loss_of(ddp(x), y) * scale).backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def expected() -> dict[str, torch.Tensor]:
    return reference_gradients(rows=60)


def case_policy_none_is_exact() -> None:
    for backend in BACKENDS:
        for cap in (25, 0.03):
            ddp = hooked(backend, "none", bucket_cap_mb=cap)
            for _ in range(3):
                gradients = step(ddp)
                assert_near(gradients, 2e-6, rows=60)
                assert_same_on_all_ranks(gradients)


def case_every_codec() -> None:
    for codec, (least, most) in LOSSY.items():
        seen = []
        for backend in BACKENDS:
            ddp = hooked(backend, codec, bucket_cap_mb=0.1)
            for _ in range(3):
                with directly():
                    gradients = step(ddp)
                assert_same_on_all_ranks(gradients)
                assert_errors_within(gradients, least, most, rows=60)
            seen.append(gradients)
        for name, grad in seen[0].items():
            assert torch.equal(grad, seen[1][name]), ("the backend changes the result", codec, name)


def case_the_bits_are_the_communicators() -> None:
    """A parameter is averaged as the group's communicator averages an array of its name, shape and policy."""
    for dtype in (torch.float32, torch.bfloat16):
        for codec, form in {**dict.fromkeys(LOSSY, "ef"), "none": "", "int4:block=64": "loco"}.items():
            if codec.startswith("sketch") and dtype is torch.bfloat16:
                continue  # sketch recovers a few of them only
            chosen = policy(codec, form, min_bytes=4096)
            ddp = hooked("hybridcomp", chosen, wide(dtype))
            comm = hc.Communicator(MPI.COMM_WORLD, chosen, "dp")
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
            for i in range(3):
                alone = wide(dtype)
                (alone(x) * (1 + i)).square().mean().backward()
                ddp.zero_grad()
                (ddp(x) * (1 + i)).square().mean().backward()
                for (name, p), q in zip(alone.named_parameters(), ddp.module.parameters(), strict=True):
                    if p.dim() == 2:
                        comm.Allreduce(MPI.IN_PLACE, p.grad, op=AVG, name=name)
                        assert torch.equal(p.grad, q.grad), (dtype, codec, form, i, name)
                comm.step += 1
            comm.Free()


def wide(dtype: torch.dtype) -> nn.Module:
    """Return a model whose matrices are large enough to go uncompressed by messages of their own."""
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 192)).to(dtype)


def case_ranks_of_one_host_share_memory() -> None:
    for codec in ("int8:block=128", "none", "powersgd:rank=2"):
        ddp = hooked("hybridcomp", codec)
        step(ddp)
        rows = ddp.state.rows()
        assert all(row.wire_bytes for row in rows)
        assert all(row.shared_bytes == row.wire_bytes for row in rows), (codec, rows)


def case_between_hosts() -> None:
    for backend in BACKENDS:
        ddp = hooked(backend, policy("int8", min_bytes=0, between_hosts=True))
        assert_near(step(ddp), 2e-6, rows=60)
        assert {row.reason for row in ddp.state.rows()} == {"all ranks are on one host"}


def case_buckets_do_not_change_the_result() -> None:
    for codec in LOSSY:
        results = []
        for cap in (25, 0.05):
            ddp = hooked("hybridcomp", policy(codec, feedback=True), bucket_cap_mb=cap)
            results.append([step(ddp) for _ in range(3)])
        for a, b in zip(*results, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a), codec


def case_feedback_makes_up_for_what_was_lost() -> None:
    """With a constant gradient, the mean of what came out nears it; without feedback the error stays."""
    exact = expected()
    for codec in ("int4:block=128", "topk:ratio=0.1", "powersgd:rank=2", "randomblock:ratio=0.3"):
        errors = {}
        for feedback in (False, True):
            ddp = hooked("hybridcomp", policy(codec, feedback))
            total: dict[str, torch.Tensor] = {}
            for _ in range(20):
                for name, grad in step(ddp).items():
                    total[name] = total.get(name, 0) + grad / 20
            errors[feedback] = max(
                relative_error(total[name], exact[name]) for name in exact if exact[name].dim() == 2
            )
        assert errors[True] < 0.5 * errors[False], (codec, errors)


def case_what_is_compressed_is_told() -> None:
    chosen = policy("int8:block=128", min_bytes=WIDTH * 4 + 1, exclude=["*up*"])
    ddp = hooked("hybridcomp", chosen)
    step(ddp)
    reasons = {row.reason: row for row in ddp.state.rows()}
    assert reasons["excluded by '*up*'"].calls == 8  # four weights, four biases
    small = next(row for reason, row in reasons.items() if reason.startswith("below min_bytes"))
    assert small.codec == "none"
    compressed = next(row for row in reasons.values() if row.codec == "int8:block=128")
    assert compressed.calls == 4
    assert compressed.raw_bytes == 4 * 4 * 2 * WIDTH * WIDTH
    assert compressed.wire_bytes < 0.3 * compressed.plain_bytes
    assert sum(row.raw_bytes for row in reasons.values()) == 4 * sum(p.numel() for p in ddp.parameters())


class Holder(nn.Module):
    """A module with a child that has the name that DDP gives its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def case_parameters_have_the_names_that_they_have_without_wrappers() -> None:
    """Patterns that are whole names exclude their parameters, of a module in DDP and in others of torch's wrappers."""
    for inside in (model, Holder, lambda: torch.compile(model(), backend="eager")):
        net = inside()
        names = {id(p): name.replace("_orig_mod.", "") for name, p in net.named_parameters()}
        excluded = list(names.values())[1:3]
        ddp = hooked("hybridcomp", policy("int8:block=128", True, exclude=excluded), net)
        step(ddp)
        reasons = {row.reason: row.calls for row in ddp.state.rows()}
        assert [reasons[f"excluded by {name!r}"] for name in excluded] == [1, 1], reasons
        assert set(parameter_names(net).items()) == set(parameter_names(ddp).items()) == set(names.items())
        assert parameter_names(torch.compile(ddp, backend="eager")) == names


def case_warm_up() -> None:
    ddp = hooked("hybridcomp", policy("int4:block=128", True, warmup_steps=2))
    for _ in range(2):
        assert_near(step(ddp), 2e-6, rows=60)
    assert_errors_within(step(ddp), 1e-2, 0.3, rows=60)
    assert any(row.reason.startswith("warm-up") for row in ddp.state.rows())


def case_resume_is_bit_identical() -> None:
    for codec in LOSSY:
        for backend in BACKENDS:
            chosen = policy(codec, feedback=True, warmup_steps=1)
            ddp = hooked(backend, chosen, bucket_cap_mb=0.1)
            for i in range(2):
                step(ddp, 1 + i)
            saved = ddp.state.memory()
            assert any(key.startswith("residual/") for key in saved)
            going_on = [step(ddp, 3), step(ddp, 4)]
            again = hooked(backend, chosen, bucket_cap_mb=0.1)
            again.state.load_memory(saved)
            for i, want in enumerate(going_on):
                got = step(again, 3 + i)
                for name, grad in want.items():
                    assert torch.equal(got[name], grad), (codec, backend, i, name)


def case_gradients_that_are_not_finite_stay_so() -> None:
    for codec in LOSSY:
        ddp = hooked("hybridcomp", policy(codec, feedback=True))
        before = step(ddp)
        memory = {k: v.copy() for k, v in ddp.state.memory().items()}
        bad = step(ddp, float("inf") if dist.get_rank() == 0 else 1.0)
        for name, grad in bad.items():
            if grad.dim() == 2:
                assert not torch.isfinite(grad).all(), (codec, name)
        assert all(torch.isfinite(torch.from_numpy(v)).all() for v in ddp.state.memory().values())
        assert memory.keys() <= ddp.state.memory().keys()
        after = step(ddp)
        assert all(torch.isfinite(grad).all() for grad in after.values())
        assert before.keys() == after.keys()


def case_other_dtypes() -> None:
    exact = expected()
    for dtype, tolerance in ((torch.float64, 1e-2), (torch.bfloat16, 5e-2), (torch.float16, 5e-2)):
        for backend in BACKENDS:
            for codec in ("int8:block=128", "powersgd:rank=64"):
                ddp = hooked(backend, policy(codec, feedback=True, min_bytes=4096), model().to(dtype))
                gradients = step(ddp)
                for name, grad in gradients.items():
                    assert grad.dtype == dtype
                    error = relative_error(grad.float(), exact[name])
                    assert error < tolerance, (dtype, codec, name, error)


def case_float64_is_exact_where_uncompressed() -> None:
    ddp = hooked("hybridcomp", "none", model().double())
    whole = model().double()
    x, y = (t.double() for t in batch(60))
    loss_of(whole(x), y).backward()
    for (_, p), grad in zip(whole.named_parameters(), step(ddp).values(), strict=True):
        assert relative_error(grad, p.grad) < 1e-14


def case_unused_parameters_and_no_sync() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = model(1), model(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    ddp = hooked("gloo", policy("int8:block=128", feedback=True), Half(), find_unused_parameters=True)
    with ddp.no_sync():
        x, y = batch(60)
        loss_of(ddp(x), y).backward()
    assert ddp.state.step == 0
    for _ in range(2):
        x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(60))
        loss_of(ddp(x), y).backward()
    assert ddp.state.step == 2
    assert all(p.grad is None for p in ddp.module.unused.parameters())
    assert all(torch.isfinite(p.grad).all() for p in ddp.module.used.parameters())


def case_convolutions() -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3))

    images = torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(4))
    whole = net()
    whole(images).square().mean().backward()
    for codec in ("powersgd:rank=32", "int8:block=128"):
        ddp = hooked("hybridcomp", policy(codec, feedback=True, min_bytes=1024), net())
        ddp(images.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        for (name, p), want in zip(ddp.module.named_parameters(), whole.parameters(), strict=True):
            assert relative_error(p.grad, want.grad) < 1e-2, (codec, name)


def case_without_a_module() -> None:
    ddp = DistributedDataParallel(model(), process_group=group("gloo"))
    state = hct.HookState("int8:block=128", process_group=group("gloo"))
    ddp.register_comm_hook(state, hct.comm_hook)
    for _ in range(3):
        assert_errors_within(step(ddp), 1e-4, 2e-2, rows=60)


def case_state_of_the_process() -> None:
    ddp = hooked("hybridcomp", policy("int4:block=128", feedback=True))
    step(ddp)
    hct.advance_step()
    saved = hct.state_dict()
    assert saved["group:default/step"] == dist.group.WORLD.comm.step == 1
    hct.advance_step()
    assert all(isinstance(t, torch.Tensor) for t in saved.values())
    mine = {k: v for k, v in saved.items() if "residual" in k}
    assert mine
    going_on = step(ddp)
    hct.load_state_dict(saved)
    assert dist.group.WORLD.comm.step == 1
    again = step(ddp)
    assert all(torch.equal(going_on[name], again[name]) for name in again)
    with pytest.raises(ValueError, match="hook:nobody"):
        hct.load_state_dict({"hook:nobody/factor/x": torch.ones(1)})


def case_overlap_with_a_training_loop() -> None:
    """Ten steps of SGD on every codec: the loss falls about as it does uncompressed."""
    losses = {}
    for codec in ("none", *LOSSY):
        ddp = hooked("hybridcomp", policy(codec, feedback=True) if codec != "none" else "none")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0)
        x, y = batch(60)
        for _ in range(15):
            step(ddp)
            optimizer.step()
        losses[codec] = loss_of(ddp.module(x), y).item()
    start = loss_of(model()(x), y).item()
    assert losses["none"] < 0.8 * start, (start, losses)
    for codec, loss in losses.items():
        assert start - loss > 0.5 * (start - losses["none"]), (codec, start, losses)


def case_a_timeout_set_later_is_the_hooks_too() -> None:
    hybrid = group("hybridcomp")
    step(hooked("hybridcomp", "int8"))
    before = timedelta(seconds=hybrid.comm.timeout)
    try:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), hybrid)
        assert hybrid.beside
        assert {comm.timeout for comm in (hybrid.comm, *hybrid.beside)} == {77}
    finally:
        dist.distributed_c10d._set_pg_timeout(before, hybrid)


def case_every_form_of_feedback() -> None:
    """All ranks agree; a resumed run goes on with the same bits; an overflow leaves the memory good."""
    forms = {"ef21": "int4:block=128", "loco:beta=0.5": "int4:block=128", "dgc": "topk:ratio=0.1"}
    for form, codec in forms.items():
        chosen = policy(codec, feedback=form)
        ddp = hooked("hybridcomp", chosen, bucket_cap_mb=0.1)
        for i in range(2):
            with directly():
                assert_same_on_all_ranks(step(ddp, 1 + i))
        bad = step(ddp, float("inf") if dist.get_rank() == 0 else 1.0)
        assert not all(torch.isfinite(grad).all() for grad in bad.values())
        saved = {k: torch.from_numpy(v.copy()).numpy() for k, v in ddp.state.memory().items()}
        going_on = [step(ddp, 3), step(ddp, 4)]
        assert all(torch.isfinite(grad).all() for run in going_on for grad in run.values())
        again = hooked("gloo", chosen, bucket_cap_mb=25)
        again.state.load_memory(saved)
        for i, want in enumerate(going_on):
            got = step(again, 3 + i)
            assert all(torch.equal(got[name], grad) for name, grad in want.items()), (codec, form, i)


def case_ef21_nears_a_constant_gradient() -> None:
    exact = expected()
    ddp = hooked("hybridcomp", policy("topk:ratio=0.2", feedback="ef21"))
    for _ in range(15):
        gradients = step(ddp)
    for name, grad in exact.items():
        assert relative_error(gradients[name], grad) < 0.02, name


def case_a_form_that_does_not_fit_fails_before_training() -> None:
    with pytest.raises(hc.PolicyError, match="feedback of powersgd must be ef"):
        hct.HookState(policy("powersgd:rank=4", feedback="loco"))
