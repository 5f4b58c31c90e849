"""Replicas agree and resumed runs go on, bit for bit, under a policy that compresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.harness import run_ranks

SCRIPT = Path(__file__).with_name("check_replicas.py")

POLICY = """
min_bytes = 64
[dp]
all_reduce = { codec = "int4:block=32", feedback = "ef" }
send = { codec = "CODEC", warmup_steps = 2 }
[pp]
backward = "int8:block=32"
"""
CYCLIC = "--micro-batches 1 --schedule"
CASES = {
    (4, "int8:block=32"): [
        "--pp 2 --dp 2 --layers 2 --micro-batches 3 --schedule 2bw",
        f"--dp 4 --layers 4 {CYCLIC} cdp-v1",
        f"--dp 4 --layers 4 {CYCLIC} cdp-v2 --clip 0",
        "--pp 2 --dp 2 --layers 2 --micro-batches 3 --schedule local",
        "--pp 2 --dp 2 --layers 4 --micro-batches 4 --schedule interleaved --virtual-stages 2",
    ],
    (3, "lossless"): [f"--dp 3 --layers 3 {CYCLIC} cdp-v2 --clip 0"],  # messages of any length
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("ranks", "codec"), CASES)
def test_bits_are_equal_on_replicas_and_after_a_pause(ranks, codec, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.replace("CODEC", codec))
    cases = [f"{case} --policy {policy}" for case in CASES[ranks, codec]]
    done = run_ranks(ranks, SCRIPT, str(tmp_path), json.dumps(cases))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout
