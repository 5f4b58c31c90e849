"""Each technique of docs/techniques.md compresses what it says and nothing else; a resumed run has the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridcomp.errors import ConfigError, PolicyError
from hybridcomp.policy import PRESETS, load_policy
from hybridcomp.policy.toml import parse_policy
from hybridcomp_lab.train.checkpoints.resume import newest, read_checkpoint
from hybridcomp_lab.train.checkpoints.stored import read
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.generate import load_model
from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.start import read_policy
from hybridcomp_lab.train.techniques import concerns
from hybridcomp_lab.train.text import load_corpus
from tests.train.harness import TINY, metrics, run_ranks, train

SCRIPT = Path(__file__).parent / "checks" / "techniques.py"
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
            "--pp 2 --dp 2 --layers 2 --micro-batches 3 --tie-embeddings",
            {"pp": ([0, 1], [0, 2], STEADY), "dp": ([9, 0], [0, 10], "stage 1 is not among the first 1")},
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


@pytest.mark.parametrize("sync", ["local_sgd:every=4", "diloco:every=4", "elastic:every=4"])
def test_differences_of_parameters_take_no_momentum(sync, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text('[dp.all_reduce]\ncodec = "powersgd"\nfeedback = "ef-sgdm"\nwarmup_steps = 2')
    with pytest.raises(PolicyError, match=f"feedback ef-sgdm of dp has momentum, and with sync {sync}"):
        read_policy(TrainConfig(dp=2, sync=sync, policy=str(file)))
    read_policy(TrainConfig(dp=2, policy=str(file)))
    read_policy(TrainConfig(dp=2, sync="gossip", policy=str(file)))
    file.write_text('[dp.all_reduce]\ncodec = "int4"\nfeedback = "ef"')
    read_policy(TrainConfig(dp=2, sync=sync, policy=str(file)))


@pytest.mark.long
@pytest.mark.timeout(100)
def test_tied_embeddings_train_as_in_one_process(tmp_path):
    file = tmp_path / "fused.toml"
    file.write_text('codec = "none"\n[embedding]\nfused = true')
    two = "--pp 2 --layers 4 --heads 2 --micro-batches 4 --tie-embeddings"
    cases = [
        f"{two} --dp 2",
        f"{two} --dp 2 --policy {file}",
        f"{two} --dp 2 --policy {file} --schedule 2bw",
        f"{two} --tp 2 --policy {file} --schedule interleaved --virtual-stages 2",
        "--dp 4 --layers 1 --heads 2 --micro-batches 4 --tie-embeddings",
    ]
    done = run_ranks(4, SCRIPT.with_name("schedules.py"), json.dumps(cases), timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_fused_sum_sends_less_and_the_model_is_whole(tmp_path):
    (tmp_path / "fused.toml").write_text('codec = "none"\n[embedding]\nfused = true')
    small = f"{TINY} --pp 2 --dp 2 --tie-embeddings --steps 2 --data {__file__}"
    sent = []
    for policy, more in (("none", ""), ("fused.toml", "--checkpoint-every 2")):
        # Short messages would go in one exchange, which sends more among four ranks than the rule below says.
        how = {"HYBRIDCOMP_ALGORITHM": "all_reduce=direct"}
        done = train(f"{small} --policy {policy} --out {policy[:5]} {more}", tmp_path, **how)
        assert done.returncode == 0, done.stderr
        (summary,) = metrics(tmp_path / policy[:5], "summary")
        sent.append(summary["wire_bytes"]["embedding"])
    assert sent[1] * 4 == sent[0] * 3  # (2 D - 1) / (3 D - 2) for D = 2 replicas

    found = newest(tmp_path / "fused")
    assert found is not None
    keys = ("pp0.tp0.model.embed.tokens.weight", "pp1.tp0.model.head.weight")
    copies = {key: torch.empty(256, 32) for key in keys}
    read(copies, found, alone=True)
    assert torch.equal(*copies.values())
    config = TrainConfig(seq_len=32, micro_batches=2, micro_batch_size=2, eval_batches=1, dp=2)
    batches = Batches(load_corpus(__file__, None, 0.1, None), config)
    model = load_model(read_checkpoint(found))
    with torch.no_grad():
        losses = [
            loss_of(model(micro[:, :-1]), micro[:, 1:]).item()
            for replica in range(2)
            for micro in map(torch.from_numpy, batches.evaluate(replica))
        ]
    assert sum(losses) / len(losses) == pytest.approx(summary["val_loss"], rel=1e-4)


@pytest.mark.parametrize("schedule", ["local", "cdp-v1"])
def test_schedules_that_cannot_tie(schedule):
    with pytest.raises(ConfigError, match=f"tie_embeddings must be false with schedule {schedule}"):
        check_config(TrainConfig(schedule=schedule, pp=2, tie_embeddings=True))


def test_a_section_of_an_embedding_that_is_not_shared(tmp_path):
    file = tmp_path / "fused.toml"
    file.write_text("[embedding]\nfused = true")
    with pytest.raises(
        PolicyError, match=r"fused\.toml:1: section \[embedding\] is for an axis .* it has pp, dp, tp"
    ):
        read_policy(TrainConfig(pp=2, policy=str(file)))
    assert read_policy(TrainConfig(pp=2, tie_embeddings=True, policy=str(file))).fused


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_is_coarser_backward_than_forward(preset):
    assert concerns(load_policy(preset), TrainConfig(pp=2, tp=2)) == []


@pytest.mark.parametrize(
    ("feedback", "fields", "told"),
    [
        ("ef-sgdm", {}, True),
        ("dgc", {"optimizer": "lans"}, True),
        ("ef-sgdm", {"optimizer": "sgd"}, True),
        ("ef-sgdm", {"optimizer": "sgd", "momentum": 0.0}, False),
        ("ef-sgdm:momentum=0", {}, False),
        ("ef", {}, False),
        ("ef-sgdm", {"dp": 1}, False),
    ],
)
def test_a_run_is_told_of_momentum_twice(feedback, fields, told):
    rules = f'dp.all_reduce = {{ codec = "int4", feedback = "{feedback}", warmup_steps = 9 }}'
    config = TrainConfig(**{"dp": 2, **fields})
    words = concerns(parse_policy(rules, "f.toml"), config)
    assert [f"feedback {feedback}" in text for text in words] == [True] * told


@pytest.mark.parametrize(
    ("rules", "axes"),
    [
        ('[pp]\nforward = "int8"\nbackward = "int4"', ["pp"]),
        ('[pp]\nbackward = "powersgd:rank=4"', ["pp"]),
        ('[pp]\nforward = "int4"\nbackward = "int8"', []),
        ('[pp]\nforward = "int8"\nbackward = { codec = "int4", feedback = "ef" }', []),
        ('[tp]\nforward = "int8"\nbackward = { codec = "int4", feedback = "ef" }', ["tp"]),  # it has no names
        ('codec = "int8"\n[pp]\nbackward = "int4"\n[tp]\nbackward = "int2"', ["pp", "tp"]),
        ('[pp]\nbackward = { codec = "int4", min_bytes = 10_000_000 }', []),
    ],
)
def test_a_run_is_told_where_backward_is_coarser(rules, axes):
    told = concerns(parse_policy(rules, "f.toml"), TrainConfig(pp=2, tp=2))
    assert [text.split()[2] for text in told] == axes
    assert concerns(parse_policy(rules, "f.toml"), TrainConfig(dp=2)) == []
