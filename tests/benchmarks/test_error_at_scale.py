"""The error of sums by ranks: what was committed, and a run of the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/planner/error.json").read_text())
ROWS = {(row["codec"], row["ranks"]): row for row in RECORD["simulated"]}


def test_what_was_simulated_is_what_ranks_measured():
    assert {row["ranks"] for row in RECORD["measured"]} == {2, 4, 8, 16}
    for row in RECORD["measured"]:
        simulated = ROWS[row["codec"], row["ranks"]]
        for way in ("once", "ring"):
            assert row[way] == pytest.approx(simulated[way], rel=0.02), row


@pytest.mark.parametrize("codec", sorted({codec for codec, _ in ROWS}))
def test_one_encoding_is_flat_and_a_ring_grows(codec):
    assert ROWS[codec, 1024]["once"] < 1.05 * ROWS[codec, 16]["once"]
    # The error grows at least by the square root of the number of ranks, and by more where it is no longer small
    # beside the sum.
    assert ROWS[codec, 1024]["ring"] > 0.95 * 8 * ROWS[codec, 16]["ring"]


def test_the_program_simulates_and_measures(tmp_path):
    out = tmp_path / "error.json"
    program = [sys.executable, "benchmarks/error_at_scale.py", "--most", "4", "--measured", "2"]
    done = subprocess.run(
        [*program, "--json", out], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [row["ranks"] for row in record["simulated"]] == [2, 4] * 4
    for row in record["simulated"]:
        committed = ROWS[row["codec"], row["ranks"]]
        assert [row["once"], row["ring"]] == pytest.approx([committed["once"], committed["ring"]], rel=1e-6)
