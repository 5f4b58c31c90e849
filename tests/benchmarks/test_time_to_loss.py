"""Check what the benchmark of times to a loss makes of runs."""

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where its own modules are, as for a script
time_to_loss = importlib.import_module("time_to_loss")


def run(variant: str, losses: list[float], seed: int = 1):
    seconds = [10.0 * (i + 1) for i in range(len(losses))]
    return time_to_loss.Run(variant, "1gbit", seed, list(range(len(losses))), seconds, losses, 10**6, [])


def test_seconds_are_between_two_evaluations():
    one = run("gravac", [4.0, 3.0, 2.0, 2.5])
    assert time_to_loss.seconds_to(one, 3.0) == 20.0
    assert time_to_loss.seconds_to(one, 2.25) == 27.5
    assert time_to_loss.seconds_to(one, 5.0) == 10.0
    assert time_to_loss.seconds_to(one, 1.9) is None


def test_the_loss_to_reach_is_one_that_both_reach():
    runs = [run("gloo", [2.0]), run("top-k 0.1", [2.5]), run("top-k 0.01", [3.0]), run("gravac", [2.4])]
    assert time_to_loss.targets(runs, None) == {("1gbit", 1): 2.5}
    assert time_to_loss.targets(runs, 2.2) == {("1gbit", 1): 2.2}
    rows = {row["variant"]: row["seconds"] for row in time_to_loss.table(runs, None)}
    assert rows == {"gloo": 10.0, "top-k 0.1": 10.0, "top-k 0.01": None, "gravac": 10.0}
    assert (
        time_to_loss.table(
            [*runs, run("gloo", [9.0], 2), run("top-k 0.1", [1.0], 2), run("gravac", [1.0], 2)], None
        )[0]["seconds"]
        is None
    )  # one seed of two does not get there


def test_a_loss_that_is_not_finite_is_refused():
    record = time_to_loss.RunRecord("gravac")
    record.add(b'{"kind": "eval", "step": 1, "loss": NaN, "elapsed": 1.0}', Path("metrics.jsonl"), 1)
    with pytest.raises(time_to_loss.CheckError, match="gravac, 1gbit, seed 3"):
        time_to_loss.run_of(record, "1gbit", 3)


def test_runs_that_a_file_has_are_kept(tmp_path: Path):
    file, about = tmp_path / "found.json", {"steps": 3, "model": "--dp 4"}
    assert time_to_loss.kept(file, about) == []
    runs = [
        run("top-k 0.1", [2.5]),
        time_to_loss.Run("gravac", "1gbit", 2, [1], [1.0], [2.0], 5, [(3, "topk")]),
    ]
    time_to_loss.write(file, about, runs, None)
    assert time_to_loss.kept(file, about) == runs
    found = json.loads(file.read_text())
    for one in found["runs"]:
        del one["processor"]
    file.write_text(json.dumps(found | {"machine": {"processor": "older"}}))
    assert {one.processor for one in time_to_loss.kept(file, about)} == {"older"}
    rows = {row["variant"]: row["seconds"] for row in time_to_loss.table(runs, None)}
    assert rows == {"top-k 0.1": None, "gravac": None}  # two seeds: there is nothing to compare
    with pytest.raises(time_to_loss.CheckError, match=r"other settings: \{'steps': 3\} there"):
        time_to_loss.kept(file, about | {"steps": 4})
    file.write_text('{"runs": [{}], "steps": 3, "model": "--dp 4"}')
    with pytest.raises(time_to_loss.CheckError, match="no runs that could be kept"):
        time_to_loss.kept(file, about)
