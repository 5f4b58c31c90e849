"""Every schedule trains as its rule says, on every kind of mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.harness import run_ranks

SCRIPT = Path(__file__).with_name("check_schedules.py")

TWO = "--pp 2 --layers 4 --heads 2 --micro-batches 4"
INTERLEAVED = "--schedule interleaved --virtual-stages 2"
CASES = {
    (3, "hybridcomp"): [
        "--dp 3 --layers 1 --heads 2 --micro-batches 3",
        "--tp 3 --layers 2 --heads 12 --micro-batches 2",
        "--pp 3 --layers 3 --heads 2 --micro-batches 4",
    ],
    (4, "hybridcomp"): [
        f"{TWO} --dp 2 --schedule gpipe",
        f"{TWO} --tp 2",
        f"{TWO} --dp 2 {INTERLEAVED}",
        f"{TWO} --dp 2 --schedule 2bw",
        f"{TWO} --tp 2 --schedule 2bw",
        "--pp 4 --layers 4 --heads 2 --micro-batches 4 --schedule 2bw",
        "--pp 4 --layers 4 --heads 2 --micro-batches 8 --schedule 2bw",
        f"{TWO} --dp 2 --schedule local",
        f"{TWO} --tp 2 --schedule local",
    ],
    (4, "gloo"): [
        f"{TWO} --dp 2",
        f"{TWO} --dp 2 {INTERLEAVED}",
        f"{TWO} --dp 2 --schedule 2bw",
        f"{TWO} --dp 2 --schedule local",
    ],
    (8, "hybridcomp"): ["--pp 2 --dp 2 --tp 2 --layers 2 --heads 2 --micro-batches 2"],
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("ranks", "backend"), CASES)
def test_weights_are_those_of_one_process_after_every_step(ranks, backend):
    cases = [f"{case} --backend {backend}" for case in CASES[ranks, backend]]
    done = run_ranks(ranks, SCRIPT, json.dumps(cases), timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout
