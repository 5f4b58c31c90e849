"""A run of the program that measures consensus by gossip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "benchmarks/consensus.py", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_the_program_measures(tmp_path: Path) -> None:
    out, picture = tmp_path / "consensus.json", tmp_path / "consensus.png"
    done = run(
        "--most", "4", "--shape", "16x12", "--bits", "300", "--json", str(out), "--picture", str(picture)
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    lines = {line["rule"]: line["points"] for line in record["lines"]}
    assert {line["ranks"] for line in record["lines"]} == {4}
    assert len(lines) == 1 + 3 + 3
    bits, errors = zip(*lines["plain"], strict=True)
    assert bits[1] == pytest.approx(2 * (32 + 8 * 8 / (16 * 12)))  # to two neighbours, with a header
    assert errors[-1] < (1 / 3) ** (
        len(bits) - 2
    )  # 1/3: the largest eigenvalue of W below 1; the slack is for the others
    ends = {rule: points[-1][1] for rule, points in lines.items()}
    assert max(error for rule, error in ends.items() if rule.startswith("power")) < 0.5 * min(
        error for rule, error in ends.items() if rule.startswith("choco")
    )
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "10"], "no shape such as 100x100"),
        (["--shape", "10x4"], "above 4, the highest rank"),
        (["--gamma", "2"], "above 0 and at most 1, not 2"),
        (["--picture", "a.pdf"], "its suffix must be .png or .svg"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
