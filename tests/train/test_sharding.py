"""Runs whose replicas share moments and experts: what they send, what a checkpoint has, and runs that can read it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hybridcomp_lab.train.checkpoints.resume import newest, read_checkpoint
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.generate import load_model
from hybridcomp_lab.train.model.experts import Mixture
from hybridcomp_lab.train.model.gpt import keep_stage, loss_of
from hybridcomp_lab.train.text import load_corpus
from tests.train.harness import metrics, train
from tests.train.same import stored

STEPS, MICRO_BATCHES, LAYERS, WIDTH, EXPERTS, TOKENS = 2, 2, 2, 32, 4, 2 * 16
RUN = (
    f"--pp 2 --dp 2 --shard zero1 --experts {EXPERTS} --expert-every 1 --layers {LAYERS} --d-model {WIDTH} --heads 2 "
    f"--seq-len 16 --micro-batches {MICRO_BATCHES} --micro-batch-size 2 --eval-batches 2 --steps {STEPS} "
    "--checkpoint-every 2 --lr 1e-2 --policy none --data text.txt --out run"
)
FLOAT = 4
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two stages, two replicas of each, a mixture in each block, ZeRO-1."""
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    done = train(RUN, folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def checkpoint(run: Path):
    found = newest(run)
    assert found is not None
    return read_checkpoint(found)


@ALONE
@pytest.mark.timeout(120)
def test_traffic_of_shards_and_of_tokens_is_counted_apart(run):
    (summary,) = metrics(run, "summary")
    wire = summary["wire_bytes"]
    # A rank sends half of what its stage shares in the reduce-scatter, and its own half in the all-gather.
    shared = {
        key: tensor.numel()
        for key, tensor in stored(checkpoint(run).path).items()
        if ".model." in key and ".experts." not in key
    }
    halves = sum(math.ceil(size / 2) for size in shared.values())  # halves of both stages
    assert wire["dp"] == summary["plain_bytes"]["dp"] == STEPS * 2 * 2 * halves * FLOAT
    # Half of the room for tokens, there and back, forward and backward, on each of 4 ranks.
    room = EXPERTS * math.ceil(1.25 * TOKENS / EXPERTS) * WIDTH * FLOAT
    assert wire["ep"] == STEPS * MICRO_BATCHES * 4 * (room // 2) * 4
    assert metrics(run, "start")[0]["parameters"] == sum(
        p.numel() for p in load_model(checkpoint(run)).parameters()
    )


@ALONE
@pytest.mark.timeout(120)
def test_each_replica_saves_its_part(run):
    keys = stored(checkpoint(run).path)
    for replica in (0, 1):
        assert keys[f"pp1.tp0.dp{replica}.model.blocks.1.mlp.experts.up"].shape == (2, WIDTH, 4 * WIDTH)
        name = "blocks.1.attn.qkv.weight"
        half = keys[f"pp1.tp0.model.{name}"].flatten().chunk(2)[replica]
        assert torch.equal(keys[f"pp1.tp0.dp{replica}.part.{name}"], half)  # nothing compresses
        assert keys[f"pp1.tp0.dp{replica}.optimizer.{name}.exp_avg"].shape == half.shape


@pytest.mark.timeout(120)
def test_generate_has_all_experts(run):
    found = checkpoint(run)
    model = load_model(found)
    config = TrainConfig(
        dp=2,
        layers=LAYERS,
        d_model=WIDTH,
        heads=2,
        seq_len=16,
        micro_batches=2,
        micro_batch_size=2,
        eval_batches=2,
    )
    batches = Batches(load_corpus(str(run.parent / "text.txt"), None, 0.1, None), config)
    model.train()  # in training experts have a capacity, and so in its evaluation
    with torch.no_grad():
        losses = [
            loss_of(model(micro[:, :-1]), micro[:, 1:]).item()
            for replica in (0, 1)
            for micro in map(torch.from_numpy, batches.evaluate(replica))
        ]
    (summary,) = metrics(run, "summary")
    assert sum(losses) / len(losses) == pytest.approx(summary["val_loss"], rel=1e-5)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(1))
    whole = model.eval()(tokens)
    torch.testing.assert_close(
        model(tokens[:, :5]), whole[:, :5]
    )  # a token's experts depend on none after it


@ALONE
@pytest.mark.timeout(120)
def test_stages_of_replicas_are_saved_once_and_make_a_model(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    done = train(
        "--dp 2 --schedule cdp-v1 --shard stages --layers 4 --d-model 32 --heads 2 --seq-len 16 --micro-batches 1 "
        "--micro-batch-size 2 --eval-batches 2 --steps 5 --checkpoint-every 5 --lr 1e-2 --policy none "
        "--data text.txt --out run",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    found = checkpoint(run)
    model = load_model(found)
    config = TrainConfig(dp=2, layers=4, d_model=32, heads=2, seq_len=16, micro_batch_size=2, eval_batches=2)
    batches = Batches(load_corpus(str(tmp_path / "text.txt"), None, 0.1, None), config)
    with torch.no_grad():
        losses = [
            loss_of(model(micro[:, :-1]), micro[:, 1:]).item()
            for replica in (0, 1)
            for micro in map(torch.from_numpy, batches.evaluate(replica))
        ]
    (summary,) = metrics(run, "summary")
    assert sum(losses) / len(losses) == pytest.approx(summary["val_loss"], rel=1e-5)
    assert summary["schedule"]["stages"] == [3, 2]
    # Weights of stage 1 go from its owner, replica 2, to replica 1 and on, twice; those of stage 2 once to replica 2.
    # The sum of the first ends with its owner, that of the second goes back. Replica 2 is told to begin; both
    # report 5 numbers and 6 counters.
    one, two = (sum(p.numel() for p in keep_stage(load_model(found), i, 2).parameters()) for i in (0, 1))
    assert summary["wire_bytes"]["dp"] == 5 * (FLOAT * (5 * one + 3 * two) + 8 + 2 * 11 * 8)
    assert metrics(run, "start")[0]["parameters"] == sum(p.numel() for p in model.parameters())
    moments = [key for key in stored(found.path) if key.endswith("exp_avg")]
    assert len(moments) == len(list(model.parameters()))  # moments of each parameter once


def test_tokens_beyond_the_capacity_are_passed_on():
    torch.manual_seed(1)
    mixture = Mixture(8, 2, 1.0)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    torch.nn.init.zeros_(mixture.router.weight)  # all tokens prefer the first expert
    y = mixture(torch.randn(1, 6, 8))
    assert bool(y[0, :3].abs().sum(1).all())
    assert not y[0, 3:].any()
    assert bool(mixture.eval()(torch.randn(1, 6, 8)).abs().sum(2).all())
