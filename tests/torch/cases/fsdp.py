"""FSDP2 with compressed communication, on hybridcomp groups and on gloo: exact, lossy, by parameter."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.torch.fsdp import segments
from tests.torch.models.fsdp import (
    FEEDBACK,
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
)

BACKENDS = ("hybridcomp", "gloo")


def rows(state) -> dict[str, float]:
    """Return the ratio by operation of what was compressed."""
    return {r.op: r.plain_bytes / r.wire_bytes for r in state.rows() if r.codec != "none"}


def case_none_is_plain_fsdp_on_gloo() -> None:
    plain = gradients(sharded(mesh_of("gloo")))
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        state = hct.compress_fsdp(model, "none")
        got = gradients(model)
        same_everywhere(got)
        for name, grad in got.items():
            assert error(grad, plain[name]) < 1e-6, (backend, name)
        assert not rows(state)


def case_lossy_is_near_and_the_same_everywhere() -> None:
    for codec, most, ratio in (("int8:block=64", 0.03, 3.0), ("int4:block=64", 0.3, 4.5)):
        exact = gradients(sharded(mesh_of("gloo")))
        results = []
        for backend in BACKENDS:
            model = sharded(mesh_of(backend))
            state = hct.compress_fsdp(model, f"{codec}:min_bytes=0")
            weights = gathered(model)
            same_everywhere(weights)
            originals = dict(net().named_parameters())
            for name, value in weights.items():
                assert 0 < error(value, originals[name]) < most or value.dim() == 1, (backend, codec, name)
            got = gradients(model)
            same_everywhere(got)
            for name, grad in got.items():
                assert error(grad, exact[name]) < 2 * most, (backend, codec, name)
            sent = [r for r in state.rows() if r.codec != "none"]
            assert {r.op for r in sent} == {"all_gather", "reduce_scatter"}
            assert sum(r.plain_bytes for r in sent) > ratio * sum(r.wire_bytes for r in sent), sent
            results.append(weights | got)
        same_bits(*results)  # whichever backend moves the bytes


def case_the_owner_keeps_full_precision() -> None:
    model = sharded(mesh_of("hybridcomp"))
    hct.compress_fsdp(model, "int4:block=64:min_bytes=0")
    loss_of(model).backward()
    for (name, p), q in zip(model.named_parameters(), net().parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name


def case_the_profiler_sees_collectives_from_start_to_end() -> None:
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        hct.compress_fsdp(model, "int8:block=64:min_bytes=0")
        gradients(model)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            if dist.get_rank():
                time.sleep(0.3)  # so that rank 0 waits in its first all-gather
            gradients(model)
        found = [event for event in seen.events() if event.name.startswith("hybridcomp")]
        for op, kind in (
            ("all_gather_into_tensor", "all_gather"),
            ("reduce_scatter_tensor", "reduce_scatter"),
        ):
            calls = [event for event in found if event.name == f"hybridcomp:{op}"]
            assert calls, (backend, op, [event.name for event in found])
            what = f"hybridcomp {kind} axis=fsdp codec=int8:"
            within = [event.time_range.start for event in found if event.name.startswith(what)]
            assert len(within) >= len(calls), (backend, op)
            lasting = [(call.time_range.start, call.time_range.end) for call in calls]
            assert all(any(start <= begun <= end for start, end in lasting) for begun in within), (
                backend,
                op,
            )
            assert all(call.input_shapes[0][0] > 0 for call in calls)
            if op.startswith("all_gather") and not dist.get_rank():
                assert max(end - start for start, end in lasting) > 200e3, (backend, lasting)


def case_exclude_and_small_ones_by_parameter() -> None:
    policy = policy_of('min_bytes = 4096\nexclude = ["2.weight"]\n[fsdp]\ncodec = "int8:block=64"\n')
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        state = hct.compress_fsdp(model, policy)
        weights = gathered(model)
        originals = dict(net().named_parameters())
        changed = {name for name, value in weights.items() if not torch.equal(value, originals[name])}
        part = 48 * -(-61 // dist.get_world_size()) * 4  # bytes of rank 0's part of 0.weight
        assert changed == ({"0.weight"} if part >= 4096 else set()), changed
        gradients(model)
        reasons = " ".join(r.reason for r in state.rows())
        assert "excluded by '2.weight'" in reasons
        assert "below min_bytes (4096)" in reasons
        sent = {r.op: r.calls for r in state.rows() if r.codec != "none"}
        assert sent["reduce_scatter"] == 1, sent  # 0.weight


def case_between_hosts() -> None:
    """All ranks are on one host, so nothing is compressed."""
    policy = policy_of('[fsdp]\ncodec = "int8:block=64"\nbetween_hosts = true\n')
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        state = hct.compress_fsdp(model, policy)
        gradients(model)
        assert not rows(state)
        assert any("all ranks are on one host" in r.reason for r in state.rows())


def case_blocks_do_not_straddle_parameters() -> None:
    for backend in BACKENDS:
        model = net()
        with torch.no_grad():
            model[2].weight.fill_(1e6)  # beside small ones in one buffer
        fully_shard(model, mesh=mesh_of(backend))
        hct.compress_fsdp(model, "int8:block=8192:min_bytes=0")
        assert error(gathered(model)["0.weight"], net()[0].weight) < 0.01, backend


def case_reshard_after_forward_or_not() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    for backend in BACKENDS:
        for reshard in (True, False):
            model = sharded(mesh_of(backend), reshard=reshard)
            hct.compress_fsdp(model, "int8:block=64:min_bytes=0")
            for _ in range(2):
                got = gradients(model)
            same_everywhere(got)
            for name, grad in got.items():
                assert error(grad, exact[name]) < 0.06, (backend, reshard, name)


def case_mixed_precision() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    for backend in BACKENDS:
        for reduce in (torch.float32, None):
            for difference in (False, True):
                mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
                model = sharded(mesh_of(backend), mixed=mixed)
                hct.compress_fsdp(model, FEEDBACK, difference=difference)
                weights = gathered(model)
                assert {v.dtype for v in weights.values()} == {torch.bfloat16}
                same_everywhere(weights)
                for _ in range(2):
                    got = gradients(model)
                same_everywhere(got)
                for name, grad in got.items():
                    assert grad.dtype is torch.float32
                    assert error(grad, exact[name]) < 0.3, (backend, reduce, name)


def case_parameters_without_a_gradient() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    for backend in BACKENDS:
        model = net()
        model.unused = torch.nn.Linear(48, 48)
        model[0].weight.requires_grad_(False)
        model.forward = lambda x, m=model: m[4](m[3](m[2](m[1](m[0](x)))))
        fully_shard(model, mesh=mesh_of(backend))
        state = hct.compress_fsdp(model, FEEDBACK)
        loss_of(model).backward()
        assert model.unused.weight.grad is None
        assert error(model[2].weight.grad.full_tensor(), exact["2.weight"]) < 0.3
        assert "2.weight" in str(list(state.memory()))
        assert rows(state)["reduce_scatter"] > 3


class Odd(torch.nn.Module):
    """Fewer rows than ranks, one row, a frozen parameter of another dtype."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = torch.nn.Linear(48, 2)
        self.up = torch.nn.Linear(2, 7)
        self.scale = torch.nn.Parameter(torch.randn(1, 40))
        self.kept = torch.nn.Parameter(torch.randn(5, 7).bfloat16(), requires_grad=False) if frozen else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.down(x)) * self.scale.sum()
        return y if self.kept is None else y + self.kept.float().sum()


def case_few_rows_and_several_dtypes() -> None:
    policy = policy_of('[fsdp]\nreduce_scatter = { codec = "int8", feedback = "ef" }\nall_gather = "int8"\n')
    for frozen in (False, True):
        exact = gradients(fully_shard(Odd(frozen=frozen), mesh=mesh_of("gloo")))
        for backend in BACKENDS:
            model = fully_shard(Odd(frozen=frozen), mesh=mesh_of(backend))
            state = hct.compress_fsdp(model, policy)
            for _ in range(2):
                got = {k: v for k, v in gradients(model).items() if k != "kept"}
            same_everywhere(got)
            for name, grad in got.items():
                assert error(grad, exact[name]) < 0.1, (frozen, backend, name)
            reasons = {r.op: r.reason for r in state.rows() if r.codec == "none"}
            assert frozen == ("several dtypes" in reasons.get("all_gather", "")), reasons
            assert "reduce_scatter" not in reasons


class Turned(torch.nn.Module):
    """A complex layer, of a size that ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.to(torch.complex64) @ self.weight
        return turned.real + 2 * turned.imag


def case_complex_parameters() -> None:
    """They travel as pairs of reals, compressed, with what is lost made up for."""
    torch.manual_seed(0)
    weights = Turned().state_dict()
    policy = policy_of('[fsdp]\nmin_bytes = 0\nreduce_scatter = { codec = "int4", feedback = "ef" }\n')
    results = []
    for backend, chosen in (("gloo", None), *((b, p) for b in BACKENDS for p in ("none", policy))):
        model = Turned()
        model.load_state_dict(weights)
        fully_shard(model, mesh=mesh_of(backend))
        state = hct.compress_fsdp(model, chosen) if chosen else None
        total = sum(gradients(model)["weight"] for _ in range(8)) / 8
        results.append((state, torch.view_as_real(total)))
    exact = results[0][1]
    for state, total in results[1:]:
        lossy = bool(rows(state))
        same_everywhere({"weight": total})
        assert (1e-4 if lossy else 0) <= error(total, exact) < (0.03 if lossy else 1e-6)
        assert lossy == any(array.size == 2 * 48 * 7 for array in state.memory().values())
    assert sum(bool(rows(state)) for state, _ in results[1:]) == len(BACKENDS)


def case_a_cut_is_of_its_buffers() -> None:
    """Refuse, before anything is sent, a buffer with elements that no segment has."""
    for backend in BACKENDS:
        model = sharded(mesh_of(backend))
        state = hct.compress_fsdp(model, "none")
        unit = next(iter(state._units.values()))
        part = torch.ones(10)
        whole = torch.ones(10 * dist.get_world_size())
        collectives, of_nine = state.collectives(unit.group), segments.whole(9, "for a test")
        with pytest.raises(hc.CodecMismatchError, match=r"all_gather .* 10 elements .* 9 on each of"):
            collectives.all_gather(whole, part, of_nine, "forward")
        with pytest.raises(hc.CodecMismatchError, match=r"reduce_scatter .* 10 elements .* 9 on each of"):
            collectives.reduce_scatter(part, whole, of_nine, dist.ReduceOp.SUM)


def case_parameters_of_one_size() -> None:
    """Parameters of one size have parts of several sizes: dimension 0 is cut, and padded."""
    policy = policy_of('[fsdp]\ncodec = "int8:block=64"\n')
    for backend in BACKENDS:
        model = torch.nn.Sequential(torch.nn.Linear(48, 70), torch.nn.Linear(70, 48), torch.nn.Linear(48, 7))
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=mesh_of(backend))
        hct.compress_fsdp(model, policy)
        for _ in range(2):
            same_everywhere(gradients(model))


def case_prefetched_modules_are_on_their_way() -> None:
    model = sharded(mesh_of("hybridcomp"))
    hct.compress_fsdp(model, FEEDBACK)
    plain = gradients(model)
    model[0].set_modules_to_forward_prefetch([model[2], model[4]])
    model[4].set_modules_to_backward_prefetch([model[2], model[0]])
    again = sharded(mesh_of("hybridcomp"))
    hct.compress_fsdp(again, FEEDBACK)
    again[0].set_modules_to_forward_prefetch([again[2], again[4]])
    again[4].set_modules_to_backward_prefetch([again[2], again[0]])
    handle = again[2].unshard(async_op=True)
    assert isinstance(
        again[2]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_result.all_gather_work, dist.Work
    )
    handle.wait()
    again[2].reshard()
    same_bits(gradients(again), plain)


def case_other_factors_and_groups() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    ranks = dist.get_world_size()
    for backend, policy in (
        ("hybridcomp", "none"),
        ("hybridcomp", "int8:block=64"),
        ("gloo", "int8:block=64"),
    ):
        model = sharded(mesh_of(backend))
        for module in (model, model[0], model[2], model[4]):
            module.set_gradient_divide_factor(2.0 * ranks)
        if hasattr(model, "set_separate_reduce_scatter_group"):  # from torch 2.13 on
            model.set_separate_reduce_scatter_group(True)
        hct.compress_fsdp(model, policy)
        got = gradients(model)
        same_everywhere(got)
        for name, grad in got.items():
            assert error(2 * grad, exact[name]) < (1e-6 if policy == "none" else 0.06), (
                backend,
                policy,
                name,
            )


def case_other_codecs() -> None:
    exact = gradients(sharded(mesh_of("gloo")))
    for codec, most in (
        ("topk:ratio=0.5", 0.9),
        ("bf16", 0.02),
        ("lossless", 1e-6),
        ("powersgd:rank=2", 1e-6),
    ):
        results = []
        for backend in BACKENDS:
            model = sharded(mesh_of(backend))
            hct.compress_fsdp(model, policy_of(f'[fsdp]\nreduce_scatter = "{codec}"\n'))
            results.append(gradients(model))
            for name, grad in results[-1].items():
                assert error(grad, exact[name]) < most, (backend, codec, name)


def case_nothing_sharded_is_an_error() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        hct.compress_fsdp(net(), "int8")


def case_residuals_of_another_layout_are_not_added() -> None:
    """A parameter that is split along its columns lies otherwise on another number of ranks: it begins anew there.

    The last case: it makes groups on two ranks alone, and the oldest torch names later groups by their number.
    """
    policy = policy_of(
        'min_bytes = 0\n[fsdp]\nreduce_scatter = { codec = "int2:block=64", feedback = "ef" }\n'
    )

    def start(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(48, 30), torch.nn.Linear(30, 7))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-0.3, 0.5, p.numel()).view(p.shape))
        columns = model[0].weight
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p is columns else None)
        return model, hct.compress_fsdp(model, policy)

    model, state = start(mesh_of("hybridcomp"))
    for _ in range(3):
        gradients(model)
    states = [None] * 3
    dist.all_gather_object(
        states, {f"{state.label}/{k}": torch.from_numpy(v.copy()) for k, v in state.memory().items()}
    )
    two = mesh_of("hybridcomp", [0, 1])
    if two is None:
        return
    arrays = {
        k.partition("/")[2]: v.numpy() for k, v in hct.reshard_state(states, 2)[dist.get_rank()].items()
    }
    fresh, _ = start(two)
    again, state = start(two)
    state.load_memory(arrays)
    new, old = gradients(fresh), gradients(again)
    assert torch.equal(new["0.weight"], old["0.weight"])
    assert not torch.equal(new["1.weight"], old["1.weight"])  # split along its rows: its residual goes on
