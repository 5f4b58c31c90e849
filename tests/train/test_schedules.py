"""Every schedule trains as its rule says, on every kind of mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.harness import run_ranks

SCRIPT = Path(__file__).with_name("check_schedules.py")

FLUSHED = {
    "gpipe": "--schedule gpipe",
    "1f1b": "",
    "interleaved": "--schedule interleaved --virtual-stages 2",
}
TWO = "--pp 2 --layers 4 --heads 2 --micro-batches 4"
CASES = {
    (3, "hybridcomp"): [
        "--dp 3 --layers 1 --heads 2 --micro-batches 3",
        "--tp 3 --layers 2 --heads 12 --micro-batches 2",
        "--pp 3 --layers 3 --heads 2 --micro-batches 4",
    ],
    (4, "hybridcomp"): [
        f"{TWO} --dp 2 {FLUSHED['gpipe']}",
        f"{TWO} --tp 2 {FLUSHED['1f1b']}",
        f"{TWO} --dp 2 {FLUSHED['interleaved']}",
    ],
    (4, "gloo"): [f"{TWO} --dp 2 {schedule}" for schedule in FLUSHED.values()],
    (8, "hybridcomp"): ["--pp 2 --dp 2 --tp 2 --layers 2 --heads 2 --micro-batches 2"],
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("ranks", "backend"), CASES)
def test_weights_are_those_of_one_process_after_every_step(ranks, backend):
    cases = [f"{case} --backend {backend}" for case in CASES[ranks, backend]]
    done = run_ranks(ranks, SCRIPT, json.dumps(cases), timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout
