import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybridcomp.cli.main import main
from hybridcomp.results.pairs import paired
from hybridcomp.results.provenance import NOT_RECORDED, commit
from hybridcomp.results.record import RunRecord
from hybridcomp_lab.cli.study import Show
from hybridcomp_lab.demo import RunFailedError
from hybridcomp_lab.study.plan import Run
from hybridcomp_lab.study.reading import read_study
from hybridcomp_lab.study.results import Results, results_of
from hybridcomp_lab.study.runner import Done, find_runs, run_study
from hybridcomp_lab.study.tables import tables
from tests.pages import check_pictures
from tests.study import fake

EXPECT = """
[[expect]]
faster = ["mine", "none"]
rate = "20mbit"
[[expect]]
faster = ["mine", "naive"]
rate = "20mbit"
[[expect]]
same_loss = ["mine", "none"]
[[expect]]
lower_loss = ["none", "naive"]
[[expect]]
fewer_bytes = ["mine", "none"]
axis = "dp"
by = 3
"""


@pytest.fixture(autouse=True)
def _fake_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "command", fake.command)
    monkeypatch.setattr("hybridcomp_lab.demo.training.POLL_SECONDS", 0.01)  # they write all they have at once


def run(folder: Path, text: str = fake.STUDY) -> tuple[Results, str]:
    study = read_study(fake.write(folder, text))
    said = io.StringIO()
    with Show(Console(file=said, width=200), len(study.runs())) as show:
        runs = run_study(study, folder / "out", show, kind="shared-memory")
    return results_of(study, runs), said.getvalue()


def test_losses_and_speeds_are_compared_pair_by_pair(tmp_path: Path) -> None:
    results, said = run(tmp_path, fake.STUDY + EXPECT)
    assert results.losses["none"].by_seed == {1: 2.0, 2: 2.01}
    assert results.losses["mine"].gap == pytest.approx(0.004)
    assert results.losses["mine"].spread == pytest.approx(0.01 / math.sqrt(2))
    assert math.isnan(results.losses["naive"].gap)
    assert results.losses["mine"].curve == {10: pytest.approx(2.009), 20: pytest.approx(2.009)}
    assert results.losses["mine"].wire_bytes["dp"] == pytest.approx(2.5e5)
    assert results.losses["naive"].wire_bytes == {}  # both of its runs diverged
    slow, fast = results.speeds["20mbit"], results.speeds["1gbit"]
    assert slow["mine"].ratios == [2.0, 2.0, 2.0]
    assert slow["none"].samples_per_s == pytest.approx(1024 / 128)
    assert fast["none"].samples_per_s == pytest.approx(2 * 1024 / 128)
    assert slow["mine"].wire_bytes["dp"] == pytest.approx(5e5)
    assert "loss naive seed 1: diverged" in said
    held = {verdict.sentence.split(":")[0]: verdict.held for verdict in results.verdicts}
    assert held == {
        "mine is faster than none at 20mbit": True,
        "mine is faster than naive at 20mbit": False,
        "mine ends at the loss of none, within 0.5% of it": True,
        "none ends at a lower loss than naive": True,
        "mine sends fewer bytes than none on dp": False,
    }


def test_the_same_loss_is_told_by_pairs_of_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = fake.STUDY.replace("[1, 2]", "[1, 2, 3]") + EXPECT
    monkeypatch.setitem(fake.BY_SEED, "step", 0.5)  # a spread over the seeds that would hide any difference
    for place, (loss, held) in enumerate([(2.012, True), (2.013, False), (1.9, True)]):
        monkeypatch.setitem(fake.LOSSES, "mine", loss)
        (folder := tmp_path / str(place)).mkdir()
        (verdict,) = [one for one in run(folder, text)[0].verdicts if one.expectation.kind == "same_loss"]
        assert verdict.held == held
        assert f"{(loss - 2) / 2.5:+.2%}, in pairs of a seed {loss - 2:+.4f} ± 0.0000" in verdict.sentence


def test_what_tells_a_mean_of_pairs_from_noise() -> None:
    # Student's t of two degrees of freedom, 4.303, times the standard error.
    assert paired([0.0506, 0.0850, 0.0954]) == pytest.approx((0.0770, 0.0582), abs=1e-4)
    assert paired([1.0] * 30) == (1.0, 0.0)
    assert paired([0.25])[0] == 0.25
    assert all(map(math.isnan, (paired([0.25])[1], *paired([]), paired([1.0, math.nan])[1])))


RARE = """
[[variants]]
name = "rare"
policy = "mine"
sync = "diloco:every=12"
"""


def test_speeds_of_rare_synchronisations_are_of_whole_rounds(tmp_path: Path) -> None:
    study = read_study(fake.write(tmp_path, fake.STUDY + RARE))
    (first, *_) = [run for run in study.runs("speed") if run.variant.name == "rare"]
    assert first.steps == 3 + 12 + 1  # to settle, a round, and the last, after which all is averaged
    record = RunRecord("rare", {"config": {"seq_len": 128, "sync": "diloco:every=12"}})
    for step in range(1, 31):  # two rounds; what does not settle, and the average at the end, take long
        seconds = 9.0 if step <= 3 or step == 30 else 1.0 + 6.0 * (step % 12 == 0)
        sent = {"dp": 100 * (step // 12) + 1000 * (step == 30)}
        record.train.append(
            {
                "step": step,
                "tokens": 1024 * step,
                "step_seconds": seconds,
                "wire_bytes": sent,
                "plain_bytes": sent,
            }
        )
    record.summary["steps"] = 30
    done = Done(first, record, "", "shared-memory")
    base = Done(replace(first, variant=study.variants[0]), record, "", "shared-memory")
    found = results_of(study, [base, done]).speeds["20mbit"]["rare"]
    assert found.step_seconds == pytest.approx(1.5)
    assert found.samples_per_s == pytest.approx(1024 / 128 / 1.5)
    assert found.wire_bytes == {"dp": pytest.approx(100 / 12)}


def test_what_gradients_take_is_told_where_variants_differ(tmp_path: Path) -> None:
    study = read_study(fake.write(tmp_path))
    row = {"step": 1, "tokens": 1, "step_seconds": 1.0}
    done = []
    for name, held in (("none", [8_000_000, 7]), ("mine", [1_000_000, 2_500_000])):
        (first, *_) = [run for run in study.runs("speed") if run.variant.name == name]
        record = RunRecord(
            name, {"config": {"seq_len": 128}}, [row], [], {"steps": 1, "gradient_bytes": held}
        )
        record.summary |= {"wire_bytes": {"dp": 2}, "plain_bytes": {"dp": 2}}
        done.append(Done(first, record, "", "shared-memory"))
    (table,) = tables(results_of(study, done))
    assert [row[-1] for row in table.rows] == ["8", "2.5"]
    assert (table.headings[-1], "Gradients: " in table.note) == ("gradients MB", True)
    (same,) = tables(results_of(study, done[:1]))
    assert (same.headings[-1], "Gradients: " in same.note) == ("ratio", False)


def test_messages_that_events_suppress_are_told_beside_losses(tmp_path: Path) -> None:
    study = read_study(fake.write(tmp_path))
    done = []
    for variant, replicas in (("none", None), ("mine", 0.6)):
        for run in study.runs("loss"):
            if run.variant.name == variant:
                record = RunRecord(variant, {"config": {}}, [], [{"step": 1, "loss": 2.0}])
                record.summary = {
                    "steps": 2,
                    "val_loss": 2.0,
                    "wire_bytes": {"dp": 3e6},
                    "plain_bytes": {"dp": 6e6},
                }
                if replicas is not None:
                    record.summary["replicas"] = {"spread": 0.1, "suppressed": replicas + 0.1 * run.number}
                done.append(Done(run, record, "", "shared-memory"))
    (table,) = tables(results_of(study, done))
    assert table.headings[-3:] == ("MB", "ratio", "suppressed")
    assert [tuple(row[-3:]) for row in table.rows] == [("1.5", "2.00", ""), ("1.5", "2.00", "75.0 %")]
    (without,) = tables(results_of(study, done[:2]))
    assert without.headings[-1] == "ratio"


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridcomp_lab.study.runner.commit", lambda: "first")
    first, _ = run(tmp_path)
    monkeypatch.setattr("hybridcomp_lab.study.runner.commit", lambda: "second")
    again, said = run(tmp_path)
    assert said == ""
    assert again.losses["mine"] == first.losses["mine"]
    assert again.commits == ("first",)
    # Another seed is new, and so is all that another number of steps changes.
    more, said = run(tmp_path, fake.STUDY.replace("[1, 2]", "[1, 2, 3]"))
    assert more.commits == ("first", "second")
    assert said.count("loss ") == 2 * 3 - 1  # "validation loss" twice, and one that diverged
    _, said = run(tmp_path, fake.STUDY.replace("steps = 10\n", "steps = 11\n"))
    assert said.count("tokens/s") == 3 * 2 * 3
    assert "seed" not in said


def test_it_goes_on_after_a_run_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Run, out: Path, policies: dict[str, Path]) -> list[str]:
        if self.name == "loss mine seed 1":
            return ["python", "-c", "import sys; sys.exit('out of luck')"]
        return fake.command(self, out, policies)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "command", failing)
        with pytest.raises(RunFailedError, match="out of luck"):
            run(tmp_path)
    study = read_study(tmp_path / "small.toml")
    assert [done.run.name for done in find_runs(study, tmp_path / "out")] == [
        "loss none seed 1",
        "loss naive seed 1",
    ]
    _, said = run(tmp_path)
    assert said.startswith("[3/24] loss mine seed 1: validation loss 2.004")


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fake.write(tmp_path, fake.STUDY + EXPECT)
    out = tmp_path / "out"
    asked = [
        "study",
        str(path),
        "--out",
        str(out),
        "--kind",
        "shared-memory",
        "--results",
        str(tmp_path / "kept"),
    ]
    assert main([*asked, "--list"]) == 0
    assert capsys.readouterr().out.count("to run ") == 24
    assert main(asked) == 1  # one expectation does not hold
    said = capsys.readouterr().out
    assert "NO  mine is faster than naive at 20mbit: 0.80 times" in said
    page = (tmp_path / "kept/report.html").read_text()
    assert "<title>A &amp; B</title>" in page
    drawn = [(tmp_path / f"kept/{name}.png").read_bytes() for name in ("loss", "speed", "tradeoff")]
    assert check_pictures(page, 3) == drawn
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {
        "results.json", "report.md", "report.html", "loss.png", "speed.png", "tradeoff.png",
    }  # fmt: skip
    values = json.loads((tmp_path / "kept/results.json").read_text())
    assert values["loss"]["naive"]["mean"] is None
    assert values["commit"] == (commit() or NOT_RECORDED)
    assert values["command"]
    assert values["machine"]["lab"] == "shared-memory"
    assert f"<td>{values['machine']['kernels']}</td>" in page
    assert "| mine | 2.0090 | 0.0071 | +0.0040 (+0.0040 to +0.0040) |" in (out / "report.md").read_text()
    assert main([*asked, "--list"]) == 0
    assert capsys.readouterr().out.count("done ") == 24


def test_a_sweep_has_a_picture_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = """[sweep]
codecs = ["int8", "int4"]
places = { dp = 'dp.all_reduce = "CODEC"' }
"""
    for number, name in enumerate(("dp int8", "dp int4")):
        monkeypatch.setitem(fake.LOSSES, name, 2.1 + number)
        monkeypatch.setitem(fake.SECONDS, name, 1.0)
    path = fake.write(tmp_path, fake.STUDY.replace('"naive", "mine"', "").split("[speed]")[0] + sweep)
    assert main(["study", str(path), "--out", str(tmp_path / "out"), "--kind", "shared-memory"]) == 0
    assert (tmp_path / "out/bits.png").stat().st_size > 10_000
    bits = json.loads((tmp_path / "out/results.json").read_text())["bits_per_value"]
    assert bits == {"int8": pytest.approx(8.25, abs=0.01), "int4": pytest.approx(4.25, abs=0.01)}
