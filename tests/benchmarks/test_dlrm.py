"""Check what the benchmark of recommendation models makes of runs."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where its own modules are, as for a script
dlrm = importlib.import_module("dlrm")


def run(variant: str, seed: int, auc: float, speed: float, wire: int):
    return dlrm.Run(variant, "1gbit", seed, auc, 0.5, speed, 1000, wire, [])


RUNS = [
    run(dlrm.NONE, 1, 0.80, 100, 1000),
    run(dlrm.NONE, 2, 0.82, 140, 1000),
    run(dlrm.ONE, 1, 0.8015, 240, 100),
    run(dlrm.ONE, 2, 0.8200, 240, 150),
    run(dlrm.DUAL, 1, 0.7995, 360, 100),
    run(dlrm.DUAL, 2, 0.8208, 360, 100),
]


def test_runs_are_compared_with_the_uncompressed_one_of_their_seed(capsys: pytest.CaptureFixture[str]):
    rows = dlrm.table(RUNS)
    by = {row["variant"]: row for row in rows}
    assert [row["speedup"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["ratio"] for row in rows] == [1.0, 8.0, 10.0]
    assert by[dlrm.ONE]["auc_difference"] == pytest.approx(0.00075)
    assert by[dlrm.ONE]["auc_farthest"] == pytest.approx(0.0015)
    assert [row["auc_kept"] for row in rows] == [True, False, True]
    dlrm.show(rows)
    said = capsys.readouterr().out
    assert "one bound at 1gbit: not met" in said
    assert "two levels at 1gbit: met" in said


def test_the_program_takes_its_flags():
    program = dlrm.PROGRAM.read_text()
    assert all(f'"{flag}"' in program for flag in dlrm.MODEL.split() if flag.startswith("--"))


def test_the_uncompressed_variant_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["dlrm.py", "--only", dlrm.DUAL])
    with pytest.raises(SystemExit, match="2"):
        dlrm.arguments()
    assert "--only must have 'uncompressed'" in capsys.readouterr().err
