"""Observations of a user of the process group: statistics, the hint at exit, traces."""

import json
import time
from pathlib import Path

import pytest
import torch

from hybridcomp.cli.main import main
from hybridcomp.cli.report import rows as traced_rows
from hybridcomp.cli.report import steps as traced_steps
from hybridcomp.collectives import StatRow
from hybridcomp.steps import NO_STEPS, StepClock, between
from tests.torch.cases.programs import program
from tests.torch.harness import mpiexec


@pytest.mark.parametrize(("wish", "told"), [("", 1), ("1", 1), ("0", 0)])
def test_a_hint_at_exit_if_nothing_was_compressed(wish: str, told: int, tmp_path) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('[dp]\nall_reduce = "int8"\n[tp]\ncodec = "bf16"\n')
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        dist.all_reduce(torch.ones(100_000))
        """),
        HYBRIDCOMP_POLICY=str(policy),
        HYBRIDCOMP_SUMMARY=wish,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the policy compresses, and yet nothing was compressed") == told
    assert done.stderr.count("mine.toml has sections dp, tp; this group's axis is default\n") == told + (
        wish == "1"
    )


def test_steps_are_counted_and_what_they_slept_is_waiting() -> None:
    clock, weight = StepClock(), torch.nn.Parameter(torch.ones(3))
    first, second = torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        clock.stepped(first)
        clock.stepped(second)  # a second optimizer's steps are part of the first one's
        time.sleep(0.1)
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
    steps = between(NO_STEPS, clock.totals)
    assert steps.count == 3
    assert steps.seconds >= 0.4
    assert steps.waited is not None
    assert 0.199 <= steps.waited <= steps.seconds - 0.2  # falling asleep and waking up are not sleep
    assert steps.length == steps.seconds / 2
    assert between(clock.totals, clock.totals).share is None


def test_summary_and_reset_of_statistics() -> None:
    done = mpiexec(
        2,
        *program("""
        import hybridcomp as hc
        from mpi4py import MPI

        dist.init_process_group("hybridcomp")
        say(hct.summary() == "")
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        sgd = torch.optim.SGD([weight])
        sgd.step()
        group = dist.new_group(pg_options=hct.Options(axis="dp"))
        for _ in range(2):
            dist.all_reduce(torch.ones(100_000), group=group)
            dist.all_reduce(torch.ones(100_000))
            say([(r.axis, r.calls) for r in hct.stats()] == [("default", 1), ("dp", 1)])
            say(hct.stats().steps.count == 1 and "in one step" in hct.summary())
            sgd.step()
            say([(r.axis, r.calls) for r in hct.stats().per_step()] == [("default", 0.5), ("dp", 0.5)])
            say(hct.stats().steps.count == 2 and "in a step, the mean of 2" in hct.summary())
            comm = hc.Communicator(MPI.COMM_WORLD)
            sgd.step()
            say((hct.stats().steps.count, comm.stats().steps.count) == (3, 1))
            say("what this rank sent" in hct.summary() and "int8" in hct.summary())
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
            hct.reset_stats()
            say(hct.stats() == [] and hct.stats().per_step() == [] and hct.stats().steps.count == 0)
            sgd.step()
            say((hct.stats().steps.count, hct.stats().steps.timed, comm.stats().steps.count) == (1, 0, 2))
            group = dist.new_group(pg_options=hct.Options(axis="dp"))
        """),
        HYBRIDCOMP_POLICY="int8",
        HYBRIDCOMP_SUMMARY="0",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 34


def test_trace_of_a_part_of_a_program(tmp_path) -> None:
    done = mpiexec(
        2,
        *program(f"""
        dist.init_process_group("hybridcomp")
        dist.all_reduce(torch.ones(10))
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        sgd = torch.optim.SGD([weight])
        hct.start_trace({str(tmp_path)!r})
        dist.all_reduce(torch.ones(100_000))
        sgd.step()
        hct.advance_step()
        sgd.step()
        say(hct.stop_trace())
        sgd.step()
        dist.all_reduce(torch.ones(10))
        """),
        HYBRIDCOMP_POLICY="int8",
        HYBRIDCOMP_SUMMARY="0",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [str(tmp_path / f"trace.{r}.json") for r in range(2)]
    for path in done.stdout.split():
        events = json.loads(Path(path).read_text())["traceEvents"]
        assert [e["args"]["bytes"] for e in events if e["name"] == "all_reduce"] == [400_000]
        steps = sorted(e["args"]["by"] for e in events if e.get("cat") == "step")
        assert steps == ["an optimizer", "an optimizer", "the program"]


def test_a_trace_shows_that_a_thread_waits_for_a_future(tmp_path) -> None:
    """Rank 0 computes, then sleeps for a future, as DDP does in compiled code, and rank 1 comes late."""
    done = mpiexec(
        2,
        *program("""
        import pathlib, time
        from mpi4py import MPI

        dist.init_process_group("hybridcomp")
        x = torch.ones(100_000)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            MPI.COMM_WORLD.recv(source=0)  # comes late, however busy the cores are
            time.sleep(0.4)
        future = dist.all_reduce(x, async_op=True).get_future()
        ended = time.perf_counter() + 0.2
        while time.perf_counter() < ended:
            pass
        if dist.get_rank() == 0:
            MPI.COMM_WORLD.send(None, 1)
        began = time.perf_counter()
        future.wait()
        took = time.perf_counter() - began
        pathlib.Path(f"{os.environ['HYBRIDCOMP_TRACE']}/took.{dist.get_rank()}").write_text(str(took))
        """),
        HYBRIDCOMP_POLICY="none",
        HYBRIDCOMP_SUMMARY="0",
        HYBRIDCOMP_TRACE=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    waited, took = [], []
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.{rank}.json").read_text())["traceEvents"]
        waits = [e for e in events if e.get("cat") == "wait" and e["args"].get("op") == "all_reduce"]
        waited.append(max(waits, key=lambda e: e["ts"])["dur"] / 1e6 if waits else 0.0)
        took.append(float((tmp_path / f"took.{rank}").read_text()))
    assert 0.3 < waited[0] < took[0] + 0.1  # none of the 0.2 s in which it computed; looks come some ms apart
    assert waited[1] < max(0.2, took[1] + 0.1)


def test_a_trace_is_written_when_a_rank_fails(tmp_path) -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 1:
            raise ValueError("on purpose")
        dist.barrier()
        """),
        HYBRIDCOMP_POLICY="none",
        HYBRIDCOMP_TRACE=str(tmp_path),
    )
    assert done.returncode
    assert "on purpose" in done.stderr
    events = json.loads((tmp_path / "trace.1.json").read_text())["traceEvents"]
    assert "all_reduce" in {event["name"] for event in events}


def test_a_hook_on_gloo_writes_a_trace_of_its_rank(tmp_path) -> None:
    done = mpiexec(
        2,
        *program("""
        from hybridcomp import trace
        dist.init_process_group("gloo")
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
        ddp.register_comm_hook(hct.HookState("int8:min_bytes=0", module=ddp), hct.comm_hook)
        ddp(torch.ones(2, 300)).sum().backward()
        trace.active().span("mine", "step", 0.0, 1.0)
        say(sorted({row.codec for row in hct.stats()}))
        """),
        HYBRIDCOMP_SUMMARY="0",
        HYBRIDCOMP_TRACE=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['int8:block=128']"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.0.json", "trace.1.json"]


COUNTED = """
import dataclasses, json, pathlib, time
how, folder = {how!r}, pathlib.Path({folder!r})
rank = int(os.environ["PMI_RANK"])
if how == "hook over gloo":
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=2)
else:
    dist.init_process_group("hybridcomp")
torch.manual_seed(0)
layers = torch.nn.Linear(64, 300), torch.nn.LayerNorm(300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 131)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
if how != "backend":
    ddp.register_comm_hook(hct.HookState(policy="mine.toml", module=ddp), hct.comm_hook)
optimizer, beside = (torch.optim.SGD(ddp.parameters(), 0.01) for _ in range(2))
for _ in range(5):
    ddp(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    beside.step()  # of a second optimizer: no step of its own
    ddp.zero_grad()
    dist.all_reduce(torch.ones(1000))
if how != "hook over gloo":
    dist.all_gather([torch.empty(7000) for _ in range(2)], torch.ones(7000))
    dist.send(torch.ones(5000), 1) if rank == 0 else dist.recv(torch.empty(5000), 0)
dist.barrier()
time.sleep(0.2)  # what the last step has started ends by itself
counted = hct.stats()
rows = [dataclasses.asdict(row) for row in counted]
(folder / f"stats.{{rank}}.json").write_text(json.dumps([counted.steps.count, rows]))
"""


@pytest.mark.parametrize("how", ["backend", "hook", "hook over gloo"])
def test_the_report_of_a_trace_has_the_counts_of_the_table_at_exit(how: str, tmp_path: Path, capsys) -> None:
    """Operations, bytes and steps, kind by kind; and so do the two tables that people see."""
    policy = tmp_path / "mine.toml"
    policy.write_text('[dp]\ncodec = "int8"\nexclude = ["0.weight"]\nmin_bytes = 4096\n')
    body = COUNTED.format(how=how, folder=str(tmp_path)).replace("mine.toml", str(policy))
    done = mpiexec(
        2,
        *program(body),
        HYBRIDCOMP_POLICY="int8",
        HYBRIDCOMP_HOSTS="1,1",
        HYBRIDCOMP_TRACE=str(tmp_path),
        HYBRIDCOMP_SUMMARY="1",
    )
    assert done.returncode == 0, done.stderr
    fields = ("calls", "raw_bytes", "plain_bytes", "wire_bytes", "shared_bytes", "between_bytes")
    for rank in range(2):
        steps, rows = json.loads((tmp_path / f"stats.{rank}.json").read_text())
        events = json.loads((tmp_path / f"trace.{rank}.json").read_text())["traceEvents"]
        table = {
            row.key: [getattr(row, field) for field in fields] for row in (StatRow(**row) for row in rows)
        }
        report = {row.key: [getattr(row, field) for field in fields] for row in traced_rows(events)}
        assert report == table
        assert traced_steps(events, 1) == steps == 5
        assert sum(row["between_bytes"] for row in rows) > 0

    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "trace.0.json").rename(alone / "trace.0.json")
    main(
        ["report", str(alone), "--no-picture"]
    )  # prints the table; what a rank waited for takes the traces of both
    tables = []
    for text in (done.stderr, capsys.readouterr().out):
        lines = text[text.index("in a step, the mean of 5") :].splitlines()[1:]
        lines = lines[: next(i for i, line in enumerate(lines) if line.startswith("total")) + 1]
        sent = lines[0].index("ratio") + len("ratio")
        tables.append([line[:sent] for line in lines])
    assert tables[0] == tables[1]
