"""Traces of programs that sleep and wait for known times are split into those."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from hybridcomp.breakdown.split import Breakdown, aligned, split
from tests.torch.harness import mpiexec

PROGRAM = Path(__file__).with_name("program.py")
STEPS = 3  # steps of each kind, in which ranks sleep for 0.1 to 0.25 s
MOST = 0.6  # share of a step; other programs may have some of the cores


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Breakdown:
    folder = tmp_path_factory.mktemp("traced")
    done = mpiexec(2, str(PROGRAM), HYBRIDCOMP_TRACE=str(folder), HYBRIDCOMP_SUMMARY="0")
    assert done.returncode == 0, done.stderr
    return split(folder, *aligned(folder), warmup=0)


def share(run: Breakdown, at: int, rank: int, *parts: str) -> float:
    """Return the parts' share of the steps of the program's kind ``at``, without its first one."""
    first = at * (STEPS + 1)
    rows = [row for row in run.of_rank(rank) if first < row.step < first + STEPS]
    assert len(rows) == STEPS - 1
    return median(
        sum(row.compute if part == "compute" else row.of_kind(part) for part in parts) / row.seconds
        for row in rows
    )


def test_parts_sum_to_the_step(run):
    assert len(run.rows) == 2 * 3 * (STEPS + 1)
    for row in run.rows:
        assert row.compute + row.communication == pytest.approx(row.seconds, abs=1e-6)
        assert row.compute >= 0


def test_who_sleeps_computes_and_the_other_waits(run):
    assert share(run, 0, 1, "compute") > MOST
    assert share(run, 0, 0, "waiting") > MOST


def test_a_slow_codec_is_encoding_and_the_other_waits(run):
    assert share(run, 1, 0, "encode") > MOST
    assert share(run, 1, 1, "waiting") > MOST


def test_what_is_behind_computing_is_not_exposed(run):
    for rank in range(2):
        assert share(run, 2, rank, "compute") > MOST
        rows = [row for row in run.of_rank(rank) if row.step > 2 * (STEPS + 1)]
        assert all(row.hidden["dp"]["wire"] + row.hidden["dp"]["encode"] > 0 for row in rows[: STEPS - 1])
