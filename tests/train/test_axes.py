"""What the trainer does beside its schedules: global batches, recomputation, sequence parallelism, bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.harness import run_ranks

SCRIPT = Path(__file__).with_name("check_axes.py")


def check(ranks: int, cases: list[list[str]]) -> None:
    done = run_ranks(ranks, SCRIPT, json.dumps(cases), timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout


@pytest.mark.timeout(100)
def test_replicas_reduce_once_a_step_whatever_the_micro_batches():
    check(2, [["replicas_reduce_once", "--dp 2 --micro-batches 1", "--dp 2 --global-batch 16"]])
