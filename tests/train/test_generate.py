"""``hybridcomp generate``: the checkpoint's model, whatever axes it was trained over, and text from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from hybridcomp.cli.main import main
from hybridcomp.errors import ConfigError
from hybridcomp_lab.cli import generate as command
from hybridcomp_lab.train.checkpoints.resume import RECORD, _own_checksum, newest, read_checkpoint
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.generate import Vocabulary, load_model, sample
from hybridcomp_lab.train.model.gpt import GPT, ModelShape, build_gpt, loss_of
from hybridcomp_lab.train.text import load_corpus
from tests.train.harness import train

TEXT = "the quick fox.\n"  # short: soon learned
SMALL = (
    "--layers 4 --d-model 32 --heads 2 --seq-len 16 --micro-batches 2 --micro-batch-size 4 --eval-batches 2 "
    "--checkpoint-every 80 --lr 1e-2 --warmup-steps 5 --policy none --data text.txt --out run"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run over pp and tp, with parts of sequences, that has learned a line by heart."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(TEXT * 600)
    done = train(f"{SMALL} --pp 2 --tp 2 --sequence-parallel --pp-neurons 0.5 --steps 80", folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.long
def test_it_is_the_model_that_was_evaluated(run):
    found = newest(run)
    assert found is not None
    model = load_model(read_checkpoint(found))
    config = TrainConfig(
        layers=4, d_model=32, heads=2, seq_len=16, micro_batches=2, micro_batch_size=4, eval_batches=2
    )
    batches = Batches(load_corpus(str(run.parent / "text.txt"), None, 0.1, None), config)
    with torch.no_grad():
        losses = [
            loss_of(model(micro[:, :-1]), micro[:, 1:]).item()
            for micro in map(torch.from_numpy, batches.evaluate(0))
        ]
    summary = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert sum(losses) / len(losses) == pytest.approx(summary["val_loss"], rel=1e-4)


def test_it_writes_what_it_has_learned(run, capsys):
    assert (
        main(["generate", str(run), "--prompt", "the quick f", "--tokens", "60", "--temperature", "0"]) == 0
    )
    assert capsys.readouterr().out == (TEXT * 5)[: 11 + 60] + "\n"


def test_seeds_and_samples(run, capsys):
    wild = [str(run), "--temperature", "3", "--top-k", "0", "--tokens", "30"]
    command.main([*wild, "--samples", "2"])
    both = capsys.readouterr().out
    command.main([*wild, "--seed", "2"])
    second = capsys.readouterr().out
    assert both.endswith(second)
    assert len(both) > len(second) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "tokens must be at least 1, not 0"),
        (["--temperature", "-1"], "temperature must be at least 0, not -1"),
        (["--temperature", "nan"], "temperature must be at least 0, not nan"),
        (["--prompt", ""], "prompt must hold at least one token"),
        (["--tokenizer", "nowhere.json"], "cannot read tokenizer nowhere.json"),
    ],
)
def test_wrong_arguments(run, arguments, message):
    with pytest.raises(ConfigError, match=message):
        command.main([str(run), *arguments])


def test_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint in .*checkpoint-every"):
        command.main([str(tmp_path)])


def test_a_damaged_checkpoint(run, tmp_path):
    found = newest(run)
    assert found is not None
    copy = tmp_path / "copy"
    shutil.copytree(found, copy)
    shard = next(copy.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"is damaged: __\d_0.distcp has 100 of"):
        command.main([str(copy)])


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"layers": 1 << 40}, "its sizes are not those of a model with"),
        ({"vocab_size": 1 << 40}, "its sizes are not those of a model with"),
        ({"heads": 0}, "its sizes are not those of a model with"),
        ({"d_model": "32"}, "key d_model must be an integer"),
        ({"capacity_factor": None}, "key capacity_factor must be a finite number"),
        (None, "key vocab_size is missing"),
    ],
)
def test_a_record_of_another_model(run, tmp_path, sizes, what):
    """Anybody can write a right checksum."""
    copy = tmp_path / "copy"
    shutil.copytree(newest(run), copy)
    record = json.loads((copy / RECORD).read_text())
    record["run"] = {} if sizes is None else record["run"] | sizes
    record["crc32"] = _own_checksum(record)
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=what):
        command.main([str(copy)])


def test_drawing_keeps_to_the_likeliest():
    shape = ModelShape(50, 1, 8, 2, 4)
    model: GPT = build_gpt(shape, 1).eval()
    context = torch.tensor([1, 2, 3, 4, 5, 6])
    with torch.no_grad():
        likeliest = set(model(context[None, -4:])[0, -1].topk(3).indices.tolist())
    drawn = set()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        drawn.add(next(sample(model, context, temperature=1.0, top_k=3, generator=generator)))
    assert drawn == likeliest


def test_bytes_of_a_character_come_together():
    vocabulary = Vocabulary(None)
    tokens = vocabulary.tokens("a→b")
    assert len(tokens) == 5
    assert list(vocabulary.texts(iter(tokens))) == ["a", "", "", "→", "b"]
