"""Each technique of docs/techniques.md compresses what it says and nothing else; a resumed run has the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.train.config import TrainConfig
from hybridcomp.train.start import read_policy
from tests.train.harness import run_ranks

SCRIPT = Path(__file__).with_name("check_techniques.py")
POLICY = """
min_bytes = 64
[pp]
backward = { codec = "CODEC", feedback = "ef", only = "cool-down" }
[dp]
all_reduce = { codec = "int4:block=32", feedback = "ef", stages = 1 }
[tp]
codec = "int8:block=32"
from_layer = 2
"""
STEADY = "not in the cool-down"
# By codec: arguments; by axis, for each rank of the pipeline, messages of a step that are compressed, and that are not
# for the reason that follows. Parameters of a layer are 8, the embeddings 2, norm and head 3, all in a bucket.
CASES = {
    "powersgd:rank=4": [
        ("--pp 4 --layers 4 --micro-batches 6", {"pp": ([0, 3, 2, 1], [0, 3, 4, 5], STEADY)}),
        ("--pp 4 --layers 4 --micro-batches 4 --schedule gpipe", {"pp": ([0, 4, 4, 4], [0] * 4, STEADY)}),
        (
            "--pp 2 --dp 2 --layers 4 --micro-batches 4 --schedule interleaved --virtual-stages 2",
            {"pp": ([2, 3], [2, 5], STEADY)},
        ),
    ],
    "int4:block=32": [
        (
            "--pp 2 --dp 2 --layers 2 --micro-batches 3",
            {"pp": ([0, 1], [0, 2], STEADY), "dp": ([10, 0], [0, 11], "stage 1 is not among the first 1")},
        ),
        (
            "--pp 2 --tp 2 --layers 4 --micro-batches 3",
            {"pp": ([0, 1], [0, 2], STEADY), "tp": ([0, 24], [24, 0], r"layer \d is before from_layer 2")},
        ),
    ],
}


@pytest.mark.timeout(100)
@pytest.mark.parametrize("codec", CASES)
def test_what_is_compressed_and_resumed(codec, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(POLICY.replace("CODEC", codec))
    done = run_ranks(4, SCRIPT, str(tmp_path), str(file), json.dumps(CASES[codec]), timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(CASES[codec])} cases, 0 problems" in done.stdout


def test_2bw_has_no_cool_down(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text('[pp]\nbackward = { codec = "int4", only = "cool-down" }')
    with pytest.raises(ConfigError, match=r"pp\.backward has only = 'cool-down', and schedule 2bw has none"):
        read_policy(TrainConfig(pp=2, schedule="2bw", policy=str(file)))
    read_policy(TrainConfig(pp=2, policy=str(file)))
