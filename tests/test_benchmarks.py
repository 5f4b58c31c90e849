"""The benchmarks run, check their results, and write what they say they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.launcher import find_mpiexec

ROOT = Path(__file__).parent.parent


def run(*args: str, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    command = [
        find_mpiexec(),
        "-n",
        str(ranks),
        sys.executable,
        str(ROOT / "benchmarks" / "allreduce.py"),
        *args,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)


def test_allreduce(tmp_path):
    out = tmp_path / "rows.json"
    done = run("--codec", "int8,none", "--size", "4K:64K:16", "--iters", "3", "--json", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["ranks"] == 3
    assert [(r["size"], r["codec"]) for r in record["rows"]] == [
        (4096, "int8:block=128"),
        (4096, "none"),
        (65536, "int8:block=128"),
        (65536, "none"),
    ]
    for row in record["rows"]:
        assert row["identical"]
        assert row["relative_error"] < (0.012 if row["codec"] != "none" else 1e-6)
        assert row["seconds"] > 0
        assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)
    assert 3.5 < record["rows"][2]["ratio"] < 4
    assert "int8:block=128" in done.stdout


@pytest.mark.parametrize(
    ("flag", "value", "match"), [("--size", "64X", "no size"), ("--codec", "int9", "int9")]
)
def test_wrong_arguments(flag, value, match):
    done = run(flag, value, ranks=1)
    assert done.returncode != 0
    assert match in done.stderr
