"""Traces of programs that sleep and wait for known times are split into those."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from hybridcomp.breakdown.split import Breakdown, aligned, split
from tests.torch.harness import mpiexec

PROGRAM = Path(__file__).with_name("program.py")
LATE, SLOW, HIDING, STEPS = 0.12, 0.06, 0.25, 3
SLACK = 0.03  # seconds: other programs have some of the cores


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Breakdown:
    folder = tmp_path_factory.mktemp("traced")
    done = mpiexec(2, str(PROGRAM), HYBRIDCOMP_TRACE=str(folder), HYBRIDCOMP_SUMMARY="0")
    assert done.returncode == 0, done.stderr
    return split(folder, *aligned(folder), warmup=0)


def of_kind(run: Breakdown, at: int, rank: int, part: str) -> float:
    """The median of the steps of the program's kind ``at``, without its first one."""
    first = at * (STEPS + 1)
    rows = [row for row in run.of_rank(rank) if first < row.step < first + STEPS]
    assert len(rows) == STEPS - 1
    return median(getattr(row, part) if part in ("compute", "seconds") else row.of_kind(part) for row in rows)


def test_parts_sum_to_the_step(run):
    assert len(run.rows) == 2 * 3 * (STEPS + 1)
    for row in run.rows:
        assert row.compute + row.communication == pytest.approx(row.seconds, abs=1e-6)
        assert row.compute >= 0


def test_who_sleeps_computes_and_the_other_waits(run):
    assert of_kind(run, 0, 1, "compute") == pytest.approx(LATE, abs=SLACK)
    assert of_kind(run, 0, 1, "waiting") < SLACK
    assert of_kind(run, 0, 0, "waiting") == pytest.approx(LATE, abs=SLACK)
    assert of_kind(run, 0, 0, "compute") < SLACK


def test_a_slow_codec_is_encoding_and_the_other_waits(run):
    assert of_kind(run, 1, 0, "encode") == pytest.approx(SLOW, abs=SLACK)
    assert of_kind(run, 1, 0, "compute") < SLACK
    assert of_kind(run, 1, 1, "waiting") == pytest.approx(SLOW, abs=SLACK)
    assert of_kind(run, 1, 1, "wire") < SLACK


def test_what_is_behind_computing_is_not_exposed(run):
    for rank in range(2):
        assert of_kind(run, 2, rank, "compute") == pytest.approx(HIDING, abs=SLACK)
        for kind in ("encode", "wire", "decode"):
            assert of_kind(run, 2, rank, kind) < SLACK
        rows = [row for row in run.of_rank(rank) if row.step > 2 * (STEPS + 1)]
        assert all(row.hidden["dp"]["wire"] + row.hidden["dp"]["encode"] > 0 for row in rows[: STEPS - 1])
