"""Replicas agree and resumed runs go on, bit for bit, under a policy that compresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.harness import run_ranks

SCRIPT = Path(__file__).parent / "checks" / "replicas.py"

POLICY = """
min_bytes = 64
[dp]
all_reduce = { codec = "int4:block=32", feedback = "ef" }
reduce_scatter = { codec = "int4:block=32", feedback = "ef", warmup_steps = 1 }
all_gather = "int8:block=32"
send = { codec = "CODEC", warmup_steps = 2 }
[pp]
backward = "int8:block=32"
"""
CYCLIC = "--dp 4 --layers 4 --micro-batches 1 --schedule"
EXPERTS = """
[ep]
all_to_all = "int8:block=32"
"""
MESH = "--pp 2 --dp 2 --layers 2 --micro-batches 3"
# The policy of all groups, and so of partial sums, is the first case's: it has a section for experts, too.
CASES = {
    f"{MESH} --experts 4 --optimizer lans": "int8:block=32",
    f"{MESH} --shard zero1 --optimizer lans": "int8:block=32",
    f"{MESH} --shard zero1 --experts 4 --expert-every 1": "int8:block=32",
    f"{MESH} --schedule 2bw --optimizer sgd --momentum 0": "int8:block=32",
    f"{MESH} --schedule 2bw --pp-neurons 0.2 --pp-neurons-refresh 2": "int8:block=32",
    f"{CYCLIC} cdp-v1": "int8:block=32",
    f"{CYCLIC} cdp-v2 --clip 0": "int8:block=32",
    f"{CYCLIC} cdp-v1 --clip 0": "lossless",  # totals of any length
    f"{MESH} --schedule local": "int8:block=32",
    "--pp 2 --dp 2 --layers 4 --micro-batches 4 --schedule interleaved --virtual-stages 2": "int8:block=32",
    f"{MESH} --sync diloco:every=2,fragments=1,delay=1": "int8:block=32",  # under way in the pause
    "--dp 2 --tp 2 --layers 2 --optimizer lans --sync diloco:every=2,fragments=2,alpha=0.5": "int8:block=32",
    "--dp 4 --layers 2 --micro-batches 1 --sync local_sgd:every=3": "int8:block=32",
    "--dp 4 --layers 2 --micro-batches 2 --sync elastic:every=2,shares=4-2-1-1": "int8:block=32",  # in a round's middle
    f"{CYCLIC} cdp-v1 --shard stages": "int8:block=32",
    f"{CYCLIC} cdp-v2 --clip 0 --shard stages": "int8:block=32",
    f"{CYCLIC} cdp-v1 --clip 0 --shard stages": "lossless",  # weights of any length
}


@pytest.mark.long
@pytest.mark.timeout(100)
def test_bits_are_equal_on_replicas_and_after_a_pause(tmp_path):
    cases = []
    for case, codec in CASES.items():
        form = "ef-sgdm" if "--momentum 0" in case else "ef"
        policy = tmp_path / f"{codec.partition(':')[0]}-{form}{'-experts' * ('--experts' in case)}.toml"
        text = POLICY.replace("CODEC", codec).replace('"ef"', f'"{form}"')
        policy.write_text(text + EXPERTS * ("--experts" in case))
        cases.append(f"{case} --policy {policy}")
    check(tmp_path, cases)


@pytest.mark.long
@pytest.mark.timeout(100)
def test_bits_are_equal_after_a_pause_in_bf16_and_where_momenta_are_exchanged(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(f'{POLICY.replace("CODEC", "int8:block=32")}[tp]\nall_reduce = "int8:block=32"\n')
    cases = [
        "--pp 2 --dp 2 --layers 2 --micro-batches 3 --dtype bf16",
        "--pp 2 --tp 2 --layers 2 --micro-batches 3 --dtype bf16",
        f"{MESH} --optimizer onebit-adam --freeze-step 2",  # the pause comes after the warm-up,
        "--dp 4 --layers 2 --micro-batches 1 --optimizer onebit-lamb --freeze-step 3",  # as it ends,
        "--dp 2 --tp 2 --layers 2 --optimizer onebit-adam --freeze-step 5",  # and within it
        "--dp 4 --layers 2 --micro-batches 2 --optimizer zero-one-adam",
    ]
    check(tmp_path, [f"{case} --policy {policy}" for case in cases])


def check(folder: Path, cases: list[str]) -> None:
    done = run_ranks(4, SCRIPT, str(folder), json.dumps(cases))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout
