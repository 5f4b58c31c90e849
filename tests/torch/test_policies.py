"""Policies of a program's groups, and what the program is told of their effects."""

import pytest

from tests.torch.cases.programs import program
from tests.torch.harness import mpiexec


@pytest.mark.parametrize(
    ("policy", "wish", "told"),
    [("int8", "", True), ("none", "", False), ("none", "1", True), ("int8", "0", False)],
)
def test_summary_at_exit(policy: str, wish: str, told: bool) -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        dist.all_reduce(torch.ones(100_000))
        """),
        HYBRIDCOMP_POLICY=policy,
        HYBRIDCOMP_SUMMARY=wish,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("what this rank sent") == int(told)
    if told:
        assert ("int8:block=128" if policy == "int8" else "the policy says none") in done.stderr


def test_parameters_arrive_exactly_under_a_bare_codec() -> None:
    done = mpiexec(
        2,
        *program("""
        from torch.nn.parallel import DistributedDataParallel
        hct.set_policy("topk:ratio=0.01")
        dist.init_process_group("hybridcomp")
        net = torch.nn.Linear(100, 100)
        ddp = DistributedDataParallel(net)
        say(net.weight.count_nonzero().item() > 9000)
        ddp(torch.ones(2, 100)).sum().backward()
        say(net.weight.grad.count_nonzero().item() <= 2 * 101)
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4


def test_a_program_without_a_mesh_is_compressed() -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        dist.all_reduce(torch.randn(100_000))
        say({(r.axis, r.codec) for r in hct.stats()} == {("default", "int8:block=128")})
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 2


def test_options_choose_the_policy_and_the_axis() -> None:
    done = mpiexec(
        2,
        *program("""
        hct.set_policy("none")
        dist.init_process_group("hybridcomp", pg_options=hct.Options(policy="hybrid", axis="dp"))
        dist.all_reduce(torch.randn(100_000))
        say({(r.axis, r.codec) for r in hct.stats()} == {("dp", "int4:block=128")})
        try:
            dist.new_group([0, 1], pg_options="hybrid")
        except TypeError as error:
            say("hybridcomp.torch.Options" in str(error))
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4


def test_warm_up_follows_advance_step(tmp_path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[dp]\nall_reduce = { codec = "int8", warmup_steps = 2 }\n')
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp", pg_options=hct.Options(axis="dp"))
        for _ in range(3):
            dist.all_reduce(torch.randn(1000))
            hct.advance_step()
        say(sorted((r.codec, r.calls) for r in hct.stats()) == [("int8:block=128", 1), ("none", 2)])
        """),
        HYBRIDCOMP_POLICY=str(policy),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 2
