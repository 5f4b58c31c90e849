"""Policies that decide as training goes on, beside tensor parallelism and shared embeddings: copies stay alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridcomp.policy.adapt.decisions import read_decisions
from tests.train.harness import TINY, metrics, run_ranks
from tests.train.same import losses, run_and_resume, stored, unequal

SCRIPT = Path(__file__).parent / "checks" / "together.py"
POLICY = """
min_bytes = 256
[dp.all_reduce]
codec = "topk:ratio=0.5"
feedback = "ef"
adapt = "gravac:first=0.5,least=0.06,every=2,window=2,eps=0.2,omega=0.01"
[dp.reduce_scatter]
codec = "threshold"
feedback = "ef"
adapt = "dct:density=0.2,check=2,every=6,scope=tensor"
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_copies_stay_alike_whatever_ranks_measure(tmp_path):
    """Check it where ranks measure unlike times, by which groups that decide for themselves let copies differ."""
    (tmp_path / "policy.toml").write_text(POLICY)
    tp, adapts = "--dp 2 --tp 2", f"--policy {tmp_path}/policy.toml"
    shared = "--dp 2 --pp 2 --tie-embeddings --policy auto"
    cases = [
        [f"{tp} --shard zero1 {adapts}", 8, True],
        [f"{tp} {adapts}", 28, True],
        [f"{tp} --policy auto", 28, True],
        *([shared, 45, together] for together in (False, True)),
    ]
    done = run_ranks(4, SCRIPT, json.dumps(cases), timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.timeout(120)
def test_a_resumed_run_goes_on_with_the_decisions_of_all_ranks(tmp_path):
    """Times do not decide here; and a file has the decisions, since all ranks make them together."""
    policy = POLICY.replace("topk:ratio=0.5", "sidco:ratio=0.05,stages=3").replace(
        "gravac:first=0.5,least=0.06,every=2,window=2,eps=0.2,omega=0.01", "sidco:every=2,drift=0.01"
    )
    flags = f"{TINY} --dp 2 --tp 2 --steps 6 --checkpoint-every 3 --freeze decided.toml"
    run = run_and_resume(tmp_path, flags, policy, 3)
    again = tmp_path / "again"
    assert losses(again) == losses(run)[3:]
    ends = [path / "checkpoints" / "step-00000006" for path in (run, again)]
    assert unequal(stored(ends[0]), stored(ends[1])) == []
    assert len(read_decisions(tmp_path / "decided.toml")) == len(metrics(run, "decision")) > 0
