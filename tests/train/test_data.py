"""Texts to tokens, tokens to batches."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.text import Corpus, load_corpus

CONFIG = TrainConfig(dp=2, micro_batches=2, micro_batch_size=3, seq_len=8, eval_batches=2)


def load(data, tokenizer=None, val_fraction=0.25, vocab_size=None):
    return load_corpus(None if data is None else str(data), tokenizer, val_fraction, vocab_size)


def counting(train=1000, held_out=200):
    """Return a corpus in which a token's value tells where it stood."""
    return Corpus(np.arange(train, dtype=np.uint16), np.arange(held_out, dtype=np.uint16), 1000, "counting")


def test_bytes_of_a_file(tmp_path):
    (tmp_path / "t.txt").write_bytes("añb".encode() * 5)
    corpus = load(tmp_path / "t.txt", val_fraction=0.5)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == "añb".encode() * 5
    assert (corpus.train.size, corpus.held_out.size, corpus.vocab_size) == (10, 10, 256)


def test_a_folder_is_read_in_order_of_names_without_what_is_no_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("3")
    (tmp_path / "b.md").write_text("2")
    (tmp_path / "a").write_text("1")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    corpus = load(tmp_path)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == b"1\n2\n3"


def test_the_standard_library_without_tests_and_packages():
    corpus = load(None)
    assert corpus.train.size > 5_000_000
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert (stdlib / "argparse.py").read_bytes() in text
    assert (Path(np.__file__).parent / "__init__.py").read_bytes() not in text
    assert b"class BaseTestCase(unittest.TestCase)" not in text
    assert load(None).fingerprint == corpus.fingerprint


def test_bin_tokens_are_mapped(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "x.bin")
    corpus = load(tmp_path / "x.bin")
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.tolist() == list(range(75))
    assert corpus.held_out.tolist() == list(range(75, 100))
    assert corpus.vocab_size == 50304


def test_a_folder_with_train_and_val_bin_says_the_split_itself(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(7, dtype="<u2").tofile(tmp_path / "val.bin")
    corpus = load(tmp_path, vocab_size=100)
    assert (corpus.train.size, corpus.held_out.size, corpus.vocab_size) == (100, 7, 100)


def test_a_tokenizer_of_hugging_face(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "to": 1, "be": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("to be or\nnot to be")
    corpus = load(tmp_path / "t.txt", tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.5)
    assert corpus.train.tolist() + corpus.held_out.tolist() == [1, 2, 0, 0, 1, 2]
    assert corpus.vocab_size == 3
    with pytest.raises(
        ConfigError, match=r"vocab_size \(2\) is smaller than the vocabulary of the text \(3\)"
    ):
        load(tmp_path / "t.txt", tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=2)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("absent", None, {}, "does not exist"),
        ("t.txt", b"\xff\xfe", {}, r"not UTF-8 text \(byte 0\)"),
        ("x.bin", b"", {}, "no file of uint16 tokens"),
        ("x.bin", b"abc", {}, "its size is 3 bytes"),
        ("x.bin", b"\xff\xff" * 10, {}, "holds token 65535, outside a vocabulary of 50304"),
        ("x.bin", b"ab" * 10, {"tokenizer": "t.json"}, "holds tokens already"),
        ("t.txt", b"abc", {"tokenizer": "absent.json"}, "cannot read tokenizer absent.json"),
        ("t.txt", b"abc", {"tokenizer": __file__}, "no Hugging Face tokenizer.json"),
        ("t.txt", b"abc", {"vocab_size": 100}, "smaller than the vocabulary"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, arguments, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, **arguments)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no UTF-8 text in the folder"):
        load(tmp_path)


def test_batches_are_windows_and_depend_on_seed_step_and_replica_only():
    batches = Batches(counting(), CONFIG)
    batch = batches.train(5, 1)
    assert batch.shape == (6, 9)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()
    assert np.array_equal(batch, Batches(counting(), CONFIG).train(5, 1))
    for other in (batches.train(6, 1), batches.train(5, 0)):
        assert not np.array_equal(batch, other)
    reseeded = Batches(counting(), dataclasses.replace(CONFIG, seed=2))
    assert not np.array_equal(batch, reseeded.train(5, 1))


def test_the_global_batch_is_the_same_for_every_dp():
    whole = Batches(counting(), dataclasses.replace(CONFIG, dp=1, micro_batches=4)).train(3, 0)
    halves = [Batches(counting(), CONFIG).train(3, replica) for replica in range(2)]
    assert np.array_equal(whole, np.concatenate(halves))


def test_training_sees_the_last_token_and_nothing_behind_it():
    batches = Batches(counting(train=98), CONFIG)
    seen = max(int(batches.train(step, 0).max()) for step in range(200))
    assert seen == 97


def test_evaluation_covers_the_held_out_text_evenly():
    batches = Batches(counting(), CONFIG)
    micro = [m for replica in range(2) for m in batches.evaluate(replica)]
    assert len(micro) == 2 * CONFIG.eval_batches
    assert all(m.shape == (3, 9) for m in micro)
    starts = np.concatenate([m[:, 0] for m in micro])
    assert (starts[0], starts[-1]) == (0, 200 - 9)
    assert np.ptp(np.diff(starts)) <= 1


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (96, 200, "shorter than one batch: counting has 96 tokens to train on, a batch takes 97"),
        (97, 8, "one sequence"),
    ],
)
def test_a_text_that_is_too_short_is_refused(train, held_out, message):
    with pytest.raises(ConfigError, match=message):
        Batches(counting(train, held_out), CONFIG)


def test_without_evaluation_no_held_out_text_is_needed():
    Batches(counting(97, 0), dataclasses.replace(CONFIG, eval_batches=0))


def test_a_token_outside_the_vocabulary_is_refused():
    batches = Batches(dataclasses.replace(counting(), vocab_size=10), CONFIG)
    with pytest.raises(ConfigError, match="outside a vocabulary of 10"):
        batches.train(0, 0)


def test_replicas_share_a_steps_sequences_as_they_are_told():
    batches = Batches(counting(), CONFIG)
    even = np.concatenate([batches.train(5, replica) for replica in (0, 1)])
    uneven = [batches.train(5, replica, (3, 1)) for replica in (0, 1)]
    assert [len(batch) for batch in uneven] == [9, 3]
    assert np.array_equal(np.concatenate(uneven), even)
