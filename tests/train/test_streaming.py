"""Streamed layers of the trainer: their rule, what they send, what a checkpoint has, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.checkpoints.resume import newest, read_checkpoint
from hybridcomp_lab.train.generate import load_model
from hybridcomp_lab.train.reading import parse
from tests.train.harness import TINY, metrics, run_ranks, train
from tests.train.same import losses, run_and_resume, stored, unequal

SCRIPT = Path(__file__).parent / "checks" / "streamed.py"
CASES = [
    "--dp 4 --layers 2 --micro-batches 2 --stream-rank 3",
    "--dp 4 --layers 1 --micro-batches 1 --stream-rank 2 --tie-embeddings --recompute blocks",
]


@pytest.mark.timeout(100)
def test_streamed_layers_train_as_the_rule_says():
    done = run_ranks(4, SCRIPT, json.dumps(CASES))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(CASES)} cases, 0 problems" in done.stdout


RUN = f"{TINY} --dp 3 --steps 6 --lr 1e-2 --warmup-steps 1 --checkpoint-every 3 --stream-rank 4 --dtype bf16"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Six steps; and the last three again, from the checkpoint after the third."""
    coarse = (
        'min_bytes = 64\ndp.all_reduce = { codec = "int8:block=64:rounding=stochastic", feedback = "ef" }\n'
    )
    return run_and_resume(tmp_path_factory.mktemp("streaming"), RUN, coarse, 3)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_has_the_same_bits(run):
    again = run.parent / "again"
    assert losses(run)[3:] == losses(again)
    pause, *ends = (
        stored(folder / "checkpoints" / f"step-{step:08d}")
        for folder, step in ((run, 3), (run, 6), (again, 6))
    )
    assert unequal(*ends) == []
    key = "pp0.tp0.schedule.stream.head.weight.left"
    assert pause[key].shape == (256, 4)
    assert not pause[key].equal(ends[0][key])
    assert not any("optimizer.head.weight" in key for key in pause)


@pytest.mark.timeout(120)
def test_a_run_under_another_policy_goes_on_at_its_step(run):
    """The fourth step is the last one of the warm-up."""
    policy = 'min_bytes = 64\ndp.all_reduce = { codec = "int8:block=64", warmup_steps = 4 }\n'
    (run.parent / "other.toml").write_text(policy)
    flags = f"{RUN} --data text.txt --policy other.toml --out other --resume run/checkpoints/step-00000003"
    done = train(flags, run.parent)
    assert done.returncode == 0, done.stderr
    entries = metrics(run.parent / "other", "train")
    sent, plain = ([one[key]["dp"] for one in entries] for key in ("wire_bytes", "plain_bytes"))
    assert sent[1] - sent[0] < 0.5 * (plain[1] - plain[0])
    before = metrics(run, "train")[2]
    assert sent[0] - before["wire_bytes"]["dp"] > 0.9 * (plain[0] - before["plain_bytes"]["dp"])


@pytest.mark.timeout(120)
def test_a_run_counts_what_it_holds_and_sends(run):
    found = newest(run)
    assert found is not None
    parameters = dict(load_model(read_checkpoint(found)).named_parameters())
    (summary,) = metrics(run, "summary")
    assert metrics(run, "start")[0]["parameters"] == sum(p.numel() for p in parameters.values())
    linear = [p for name, p in parameters.items() if p.dim() == 2 and "embed" not in name]
    others = sum(p.nbytes for p in parameters.values()) - sum(p.nbytes for p in linear)
    held = others + sum(4 * 4 * sum(p.shape) for p in linear)
    assert summary["gradient_bytes"] == [held] * 3
    # Three ranks, each 4 / 3 of what it holds, in each of six steps; and reports of losses.
    assert 6 * 4 * held < summary["plain_bytes"]["dp"] < 6 * 4 * held + 5000
    assert 0.25 < summary["wire_bytes"]["dp"] / summary["plain_bytes"]["dp"] < 0.45


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--stream-rank 0", "stream_rank must be at least 1, not 0"),
        ("--stream-rank 4 --stream-lr 0", "stream_lr must be positive and finite, not 0"),
        ("--stream-rank 4 --pp 2", "pp must be 1, not 2"),
        ("--stream-rank 4 --tp 2", "tp must be 1, not 2"),
        ("--stream-rank 4 --dp 2 --schedule cdp-v1 --micro-batches 1", "schedule must be 1f1b, not cdp-v1"),
        ("--stream-rank 4 --dp 2 --shard zero1", "shard must be none, not zero1"),
        ("--stream-rank 4 --dp 2 --experts 2", "experts must be 0, not 2"),
        ("--stream-rank 4 --dp 2 --sync local_sgd:every=4", "sync must be left out, not local_sgd:every=4"),
    ],
)
def test_what_does_not_go_with_it_is_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse(arguments.split())
