"""PyTorch's own parallelism under a policy that compresses all axes: replicas bit-identical, gradients near."""

import tempfile

import torch
import torch.distributed as dist

import hybridcomp.torch as hct
from tests.torch.models import parallel

_TOML = """
[dp]
all_reduce = "int8:block=128"
[fsdp]
codec = "int8:block=128"
[tp]
codec = "int8:block=128"
[pp]
codec = "int8:block=128"
"""
with tempfile.NamedTemporaryFile("w", suffix=".toml") as _file:
    _file.write(_TOML)
    _file.flush()
    POLICY = hct.set_policy(_file.name)


def rows(axis: str) -> dict[str, float]:
    """Return bytes on the wire by operation, of what was compressed on an axis."""
    found = {r.op: r for r in hct.stats() if r.axis == axis and r.codec != "none"}
    for row in found.values():
        # Short sums go in one exchange, in which four ranks send twice the bytes.
        times = 2 if row.op == "all_reduce" else 1
        assert row.wire_bytes < 0.3 * times * row.plain_bytes, row
    return {op: row.wire_bytes for op, row in found.items()}


def fresh_world() -> None:
    """Make another default group: the axis of a mesh over all ranks is the default group's."""
    from datetime import timedelta

    dist.destroy_process_group()
    dist.init_process_group("hybridcomp", timeout=timedelta(seconds=40))


def case_ddp() -> None:
    fresh_world()
    gradients = parallel.ddp_gradients(parallel.ddp(bucket_cap_mb=0.05))
    parallel.assert_same_on_all_ranks(gradients)
    parallel.assert_errors_within(gradients, 1e-4, 2e-2)
    assert rows("dp").keys() == {"all_reduce"}


def case_fsdp() -> None:
    fresh_world()
    gradients = parallel.fsdp_gradients("fsdp")
    parallel.assert_same_on_all_ranks(gradients)
    parallel.assert_errors_within(gradients, 1e-4, 5e-2)
    assert rows("fsdp").keys() == {"all_gather", "reduce_scatter"}


def case_tensor_parallel() -> None:
    fresh_world()
    gradients = parallel.tp_gradients()
    replicated = {k: v for k, v in gradients.items() if "norm" in k or "down.bias" in k}
    parallel.assert_same_on_all_ranks(replicated)
    parallel.assert_errors_within(gradients, 1e-5, 5e-2)
    assert "all_reduce" in rows("tp")


def case_pipeline() -> None:
    fresh_world()
    gradients = parallel.pipeline_gradients()
    parallel.assert_errors_within(gradients, 1e-5, 5e-2)
    assert rows("pp").keys() == {"send"}


def case_statistics_survive_the_group() -> None:
    group = dist.new_group(pg_options=hct.Options(policy="int8:block=128", axis="cp"))
    dist.all_reduce(torch.ones(1 << 14), group=group)
    dist.destroy_process_group(group)
    assert rows("cp").keys() == {"all_reduce"}


def case_axis_of_mesh_groups() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    fresh_world()
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert [mesh[name].get_group().axis for name in ("pp", "dp", "tp")] == ["pp", "dp", "tp"]
    assert dist.group.WORLD.axis == "default"
    told = dist.new_group(list(range(4)), pg_options=hct.Options(policy="none", axis="cp"))
    assert (told.axis, told.comm.policy.name) == ("cp", "none")
    assert torch.equal(torch.tensor(dist.get_process_group_ranks(told)), torch.arange(4))


def case_phases_of_a_pipeline_and_of_tensor_parallelism() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write('[pp]\nforward = "int8"\n[tp]\nbackward = "int8"\n')
        file.flush()
        hct.set_policy(file.name)
    try:
        for axis, op, run in (
            ("pp", "send", parallel.pipeline_gradients),
            ("tp", "all_reduce", parallel.tp_gradients),
        ):
            fresh_world()
            before = {row.key: row.calls for row in hct.stats()}
            run()
            calls = {True: 0, False: 0}
            for row in hct.stats():
                if (
                    row.axis == axis
                    and row.op == op
                    and row.reason.startswith("policy") | (row.codec == "none")
                ):
                    calls[row.codec != "none"] += row.calls - before.get(row.key, 0)
            rank = dist.get_rank()
            if axis == "tp":
                assert calls[True] >= 4
                assert calls[False] >= 4
            elif rank == 0:
                assert calls[True] == 4
            elif rank == 3:
                assert calls[True] == 0
                assert calls[False] >= 4
    finally:
        hct.set_policy(POLICY)
