"""Every schedule trains as its rule says, on every kind of mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.harness import TINY, metrics, run_ranks, train

SCRIPT = Path(__file__).parent / "checks" / "schedules.py"

TWO = "--pp 2 --layers 4 --heads 2 --micro-batches 4"
SEQUENCE = "--tp 2 --sequence-parallel"
CYCLIC = "--heads 2 --micro-batches 1 --schedule"
SMALL = "--layers 2 --heads 2 --micro-batches 2"
EXPERTS = "--experts 4 --expert-every 1"
ZERO = "--shard zero1 --bucket-mb 0.05"
HANDED = "--shard stages"
PREDICT = "--predict-weights"
LABELS = "--synthetic-labels"
NEURONS = "--pp-neurons 0.2 --pp-neurons-refresh 2"
INTERLEAVED = "--schedule interleaved --virtual-stages 2"
# All cases of a number of ranks run in one start of them.
CASES = {
    (2, "hybridcomp"): [
        f"--dp 2 --layers 2 {CYCLIC} cdp-v1 {HANDED}",
        f"--dp 2 --layers 4 {CYCLIC} cdp-v2 --clip 0 {HANDED} --optimizer lans",
    ],
    (2, "gloo"): [
        TWO,
        f"{TWO} {INTERLEAVED} --optimizer sgd",
        f"{TWO} --schedule local",
        f"{TWO} --schedule local {LABELS}",
        f"--dp 2 --layers 2 {CYCLIC} cdp-v2 --clip 0",
        f"{TWO} --schedule 2bw {PREDICT}",
        f"--layers 2 --heads 2 {SEQUENCE}",
        f"--dp 2 {SMALL} {EXPERTS} {ZERO}",
        f"--dp 2 --layers 3 --heads 2 --micro-batches 2 {NEURONS} --pp-neurons-after 0 1",
    ],
    (3, "hybridcomp"): [
        "--dp 3 --layers 1 --heads 2 --micro-batches 3",
        "--tp 3 --layers 2 --heads 12 --micro-batches 2",
        "--pp 3 --layers 3 --heads 2 --micro-batches 4",
        f"--dp 3 --layers 3 {CYCLIC} cdp-v1 {PREDICT} --optimizer sgd",
        f"--dp 3 --layers 3 {CYCLIC} cdp-v2 --clip 0 {PREDICT}",
        f"--dp 3 --layers 1 --d-model 4 --heads 2 --micro-batches 3 {ZERO} --optimizer lans --clip 0.05",
        "--dp 3 --layers 2 --heads 2 --micro-batches 2 --experts 6 --capacity-factor 1 --balance-loss 0.1",
        f"--dp 3 --layers 3 {CYCLIC} cdp-v1 {HANDED}",
        f"--dp 3 --layers 3 {CYCLIC} cdp-v2 --clip 0 {HANDED} --recompute blocks",
        f"--pp 3 --layers 3 --heads 2 --micro-batches 4 {NEURONS} --recompute blocks",
    ],
    (4, "hybridcomp"): [
        f"{TWO} {SEQUENCE}",
        f"{TWO} {SEQUENCE} {INTERLEAVED} --recompute blocks",
        f"{TWO} {SEQUENCE} --schedule 2bw",
        f"{TWO} {SEQUENCE} --schedule local {LABELS}",
        f"{TWO} --dp 2 --schedule gpipe",
        f"{TWO} --tp 2",
        f"{TWO} --dp 2 {INTERLEAVED}",
        f"{TWO} --tp 2 --schedule 2bw --optimizer lans",
        f"{TWO} --dp 2 --schedule 2bw {PREDICT} --optimizer lans",
        "--pp 4 --layers 4 --heads 2 --micro-batches 4 --schedule 2bw",
        "--pp 4 --layers 4 --heads 2 --micro-batches 8 --schedule 2bw",
        f"{TWO} --dp 2 --schedule local {LABELS} --optimizer sgd",
        f"{TWO} --tp 2 --schedule local --optimizer lans",
        f"--dp 4 --layers 4 {CYCLIC} cdp-v1",
        f"--dp 4 --layers 4 {CYCLIC} cdp-v2 --clip 0",
        f"--pp 2 --dp 2 {SMALL} --schedule gpipe {ZERO} --optimizer sgd",
        f"--pp 2 --dp 2 {SMALL} {EXPERTS} --recompute blocks --optimizer lans",
        f"{TWO} --dp 2 {INTERLEAVED} --experts 4 {ZERO}",
        f"--dp 2 --tp 2 {SMALL} {EXPERTS} {ZERO} --optimizer lans",
        f"--dp 2 {SMALL} {SEQUENCE} {ZERO}",
        f"--dp 4 --layers 4 {CYCLIC} cdp-v1 {HANDED}",
        f"--dp 4 --layers 4 {CYCLIC} cdp-v2 --clip 0 {HANDED}",
        f"--pp 4 --layers 4 --heads 2 --micro-batches 4 --schedule gpipe {NEURONS}",
        f"{TWO} {SEQUENCE} {INTERLEAVED} {NEURONS}",
        f"{TWO} --dp 2 --schedule 2bw {NEURONS} --optimizer lans",
    ],
    (5, "hybridcomp"): [
        f"--dp 5 --layers 5 {CYCLIC} cdp-v1 {HANDED}",
        f"--dp 5 --layers 5 {CYCLIC} cdp-v2 --clip 0 {HANDED}",
    ],
    (8, "hybridcomp"): ["--pp 2 --dp 2 --tp 2 --layers 2 --heads 2 --micro-batches 2"],
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("ranks", "backend", "cases"),
    [pytest.param(*key, cases, id="-".join(map(str, key))) for key, cases in CASES.items()],
)
def test_weights_are_those_of_one_process_after_every_step(ranks, backend, cases):
    cases = [f"{case} --backend {backend}" for case in cases]
    done = run_ranks(ranks, SCRIPT, json.dumps(cases), timeout=190)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("arguments", "peaks"),
    [
        ("--pp 2 --schedule 2bw", {"name": "2bw", "weight_versions": [2, 2], "stashes": [2, 1]}),
        (
            "--dp 2 --micro-batches 1 --schedule cdp-v2 --clip 0",
            {"name": "cdp-v2", "weight_versions": [2, 1], "stashes": [2, 2]},
        ),
    ],
    ids=["2bw", "cdp-v2"],
)
def test_a_run_tells_every_step_once_and_what_it_held(arguments, peaks, tmp_path):
    done = train(f"{TINY} {arguments} --policy none --steps 5 --eval-every 3 --out run", tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    entries = metrics(run, "train")
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    assert all(entry["step_seconds"] > 0 for entry in entries)
    assert [entry["step"] for entry in metrics(run, "eval")] == [3, 5]
    (summary,) = metrics(run, "summary")
    assert summary["schedule"] == peaks
    assert entries[-1]["elapsed"] == summary["seconds"]
