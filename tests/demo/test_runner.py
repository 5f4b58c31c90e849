import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hybridcomp.errors import ConfigError, PolicyError
from hybridcomp_lab.cli.demo import MINUTES, Show, announcement
from hybridcomp_lab.demo import DemoPlan, Run, RunFailedError, run_all, training
from tests.demo.fake import lines

SMALL = DemoPlan(hosts=2, ppn=1, pp=1, dp=2, tp=1, steps=12, warmup_steps=2)
# Program that writes a run's metrics a few lines at a time, on the first rank alone.
TRAINER = """
import json, os, pathlib, sys, time
if os.environ.get("PMI_RANK", "0") == "0":
    with (pathlib.Path(sys.argv[1]) / "metrics.jsonl").open("w", buffering=1) as file:
        for line in json.loads(sys.argv[2]):
            file.write(line)
            time.sleep(0.02)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakePlan(DemoPlan):
    """Plan whose runs write given metrics."""

    def command(self, run: Run, out: Path) -> list[str]:
        return ["python", "-c", TRAINER, str(out), json.dumps(lines(0.5, 2.0, 1, steps=run.steps))]


def fake_plan() -> FakePlan:
    return FakePlan(**dataclasses.asdict(SMALL))


def shown() -> tuple[Show, io.StringIO]:
    text = io.StringIO()
    return Show(Console(file=text, width=200)), text


def test_all_runs_of_the_plan(tmp_path: Path) -> None:
    stale = tmp_path / "none/metrics.jsonl"
    stale.parent.mkdir()
    stale.write_text("stale\n")
    (tmp_path / "none/mine.txt").write_text("kept")
    show, text = shown()
    with show:
        outcome = run_all(fake_plan(), tmp_path, show, kind="shared-memory")
    assert list(outcome.records) == ["none", "naive", "hybrid"]
    assert all(record.summary["steps"] == 12 for record in outcome.records.values())
    assert "speed is not the point" in outcome.notes[0]
    assert outcome.commands["naive"].startswith("hybridcomp lab -n 2 --ppn 1 --rate 200mbit -- python")
    assert (tmp_path / "none/mine.txt").exists()
    out = text.getvalue()
    assert "none: 12 steps under policy none, shared-memory" in out
    assert re.search(r"step +12  loss +2\.091", out)
    assert "validation loss 2.000" in out


@pytest.mark.parametrize("plan", MINUTES)
def test_what_comes_is_said_at_once(plan: DemoPlan) -> None:
    plan.check()
    said = announcement(plan, 2, 0.3)
    assert (
        f"{plan.steps} steps each, on {plan.hosts * plan.ppn} ranks of 4 hosts with links of 200mbit" in said
    )
    assert said.endswith(f"about {MINUTES[plan]} minutes on two cores.")
    assert "minutes" not in announcement(dataclasses.replace(plan, steps=500), 2, 0.3)
    assert "one core" in announcement(plan, 1, 0.3)
    assert "load 2.5" in announcement(plan, 2, 2.5)


@pytest.mark.lab
def test_where_links_are_shaped_the_baseline_also_runs_unshaped(tmp_path: Path) -> None:
    show, _ = shown()
    with show:
        outcome = run_all(fake_plan(), tmp_path, show)
    if outcome.kind == "shared-memory":
        pytest.skip(outcome.notes[0])
    assert list(outcome.records) == ["unshaped", "none", "naive", "hybrid"]
    assert "--rate none" in outcome.commands["unshaped"]


@pytest.mark.parametrize(
    ("program", "said"),
    [("import sys; sys.exit('out of luck')", "out of luck"), ("print('no metrics')", "no metrics")],
)
def test_a_run_that_fails_says_so_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(FakePlan, "command", lambda self, run, out: ["python", "-c", program])
    show, _ = shown()
    with show, pytest.raises(RunFailedError, match=said):
        run_all(fake_plan(), tmp_path, show, kind="shared-memory")


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlan, "command", lambda self, run, out: ["sleep", "100"])
    monkeypatch.setattr(training, "SILENCE_SECONDS", 0.5)
    show, _ = shown()
    with show, pytest.raises(RunFailedError, match="has written nothing"):
        run_all(fake_plan(), tmp_path, show, kind="shared-memory")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dp": 3}, ConfigError, "dp \\* tp is 3, but hosts \\* ppn is 2"),
        ({"steps": 5}, ConfigError, "at least 10 steps"),
        ({"policies": ("naive",)}, ConfigError, "'none'"),
        ({"policies": ("none", "none")}, ConfigError, "twice"),
        ({"policies": ("none", "int8:block=128")}, ConfigError, "by name"),
        ({"policies": ("none", "nonsense")}, PolicyError, "nonsense"),
    ],
)
def test_wrong_plans(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(SMALL, **change).check()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_with_the_real_trainer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plan = dataclasses.replace(
        SMALL, layers=2, d_model=64, heads=2, seq_len=32, eval_batches=2, policies=("none", "hybrid")
    )
    show, _ = shown()
    with show:
        outcome = run_all(plan, tmp_path, show, kind="shared-memory")
    none, hybrid = outcome.records["none"], outcome.records["hybrid"]
    assert [len(record.train) for record in (none, hybrid)] == [12, 12]
    assert none.train[0]["loss"] == pytest.approx(hybrid.train[0]["loss"], rel=1e-3)
    assert none.evaluations
    assert none.tokens_per_s == pytest.approx(plan.tokens_per_step / none.step_seconds, rel=0.9)
    assert 0 < hybrid.wire_bytes["dp"] < none.wire_bytes["dp"]
    assert sys.executable not in outcome.commands["none"]
