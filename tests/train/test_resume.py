"""Choice of the checkpoint to resume, and how the metrics go on."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from hybridcomp.errors import ConfigError, MismatchError
from hybridcomp_lab.train.checkpoints.checkpoint import _prune
from hybridcomp_lab.train.checkpoints.resume import (
    RECORD,
    Checkpoint,
    _own_checksum,
    check_fits,
    find_checkpoint,
    run_identity,
)
from hybridcomp_lab.train.checkpoints.stored import described, read
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.metrics import MetricsFile
from hybridcomp_lab.train.start import check_agreement, prepare

CONFIG = TrainConfig(steps=10)
IDENTITY = run_identity(CONFIG, 256, "text")


def checkpoint(run, step, identity=IDENTITY):
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    made = Checkpoint(path, step, 1.5, "digest", identity)
    made.write(path)
    return made


def test_the_newest_checkpoint_is_found(tmp_path):
    checkpoint(tmp_path, 4)
    newest = checkpoint(tmp_path, 8)
    (tmp_path / "checkpoints" / ".step-00000009.partial").mkdir()
    (tmp_path / "checkpoints" / "step-00000010").mkdir()  # without a record: never finished
    for resume, out in (("auto", str(tmp_path)), (str(tmp_path), None), (str(newest.path), None)):
        assert find_checkpoint(dataclasses.replace(CONFIG, resume=resume, out=out)) == newest


def test_auto_starts_anew_where_there_is_none(tmp_path):
    assert find_checkpoint(dataclasses.replace(CONFIG, resume="auto", out=str(tmp_path))) is None
    assert find_checkpoint(CONFIG) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"resume": "auto"}, "give it with --out"), ({"resume": "nowhere"}, "no checkpoint in nowhere")],
)
def test_what_is_not_there_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        find_checkpoint(dataclasses.replace(CONFIG, **changes))


def test_a_damaged_record_is_named(tmp_path):
    made = checkpoint(tmp_path, 4)
    (made.path / "checkpoint.json").write_text('{"step": 4}')
    with pytest.raises(ConfigError, match="no record of a checkpoint"):
        find_checkpoint(dataclasses.replace(CONFIG, resume=str(made.path)))


def test_a_truncated_file_is_named_and_the_checkpoint_before_offered(tmp_path):
    older, newer = tmp_path / "checkpoints/step-00000004", tmp_path / "checkpoints/step-00000008"
    for path, step in ((older, 4), (newer, 8)):
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(bytes(1000))
        Checkpoint(path, step, 1.5, "digest", IDENTITY).write(path)
    with (newer / "__0_0.distcp").open("r+b") as file:
        file.truncate(400)
    offer, auto = f"--resume {older}", dataclasses.replace(CONFIG, resume="auto", out=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"__0_0.distcp has 400 of 1000 bytes; .*{offer}$"):
        find_checkpoint(dataclasses.replace(CONFIG, resume=str(newer)))
    found = find_checkpoint(auto)
    assert (found.path, found.step) == (older, 4)
    assert found.passed_over == (f"the checkpoint {newer} is damaged: __0_0.distcp has 400 of 1000 bytes",)
    (newer / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=rf"__0_0.distcp is missing; .*{offer}$"):
        find_checkpoint(dataclasses.replace(CONFIG, resume=str(newer)))
    (older / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 0 of 1000 bytes$"):  # none before it
        find_checkpoint(dataclasses.replace(CONFIG, resume=str(older)))
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no checkpoint that is whole: .*{newer}"):
        find_checkpoint(auto)


def test_contents_that_have_changed_are_found_where_they_are_looked_at(tmp_path):
    run = dataclasses.replace(CONFIG, resume="auto", out=str(tmp_path))
    older, newer = tmp_path / "checkpoints/step-00000004", tmp_path / "checkpoints/step-00000008"
    for path, step in ((older, 4), (newer, 8)):
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(bytes(1000))
        Checkpoint(path, step, 1.5, "digest", IDENTITY).write(path)
    (newer / "__0_0.distcp").write_bytes(bytes(500) + b"\1" + bytes(499))
    found = find_checkpoint(run)
    assert found.path == older
    assert "the contents of __0_0.distcp have changed" in found.passed_over[0]
    assert find_checkpoint(run, contents=False).path == newer


def test_a_record_from_before_checksums_is_read(tmp_path):
    made = checkpoint(tmp_path, 4)
    (made.path / "x").write_bytes(b"123")
    record = json.loads((made.path / RECORD).read_text())
    del record["crc32"]
    (made.path / RECORD).write_text(json.dumps(record | {"files": {"x": 3}}))
    assert find_checkpoint(dataclasses.replace(CONFIG, resume=str(made.path))) == made
    (made.path / RECORD).write_text(json.dumps(record | {"files": {"x": 4}}))
    with pytest.raises(ConfigError, match="x has 3 of 4 bytes"):
        find_checkpoint(dataclasses.replace(CONFIG, resume=str(made.path)))


def test_a_record_that_is_nested_deep_is_no_record(tmp_path):
    made = checkpoint(tmp_path, 4)
    (made.path / RECORD).write_text(100_000 * "[")
    with pytest.raises(ConfigError, match="no record of a checkpoint"):
        find_checkpoint(dataclasses.replace(CONFIG, resume=str(made.path)))


def test_damaged_checkpoints_do_not_count_as_newer_ones(tmp_path):
    for step in (2, 4, 6, 9):
        checkpoint(tmp_path, step)
    _prune(tmp_path / "checkpoints/step-00000006", keep=2)  # resumed from 4, since 9 was damaged
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
        "step-00000009",
    ]


def stored(state, folder):
    """Have torch write tensors into a checkpoint; return its folder."""
    path = folder / "checkpoint"
    with warnings.catch_warnings(action="ignore"):  # torch warns of what is meant: one process
        save(state, checkpoint_id=str(path), no_dist=True)
    return path


def test_what_torch_has_written_is_read(tmp_path):
    state = {
        "x": torch.arange(6.0).view(2, 3),
        "n": torch.tensor(3),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }
    path = stored(state, tmp_path)
    assert {key: (t.shape, t.dtype) for key, t in described(path).items()} == {
        key: (t.shape, t.dtype) for key, t in state.items()
    }
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    read(into, path, alone=True)
    assert all(torch.equal(into[key], state[key]) for key in state)


class Harm:
    """Write a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "done"))


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_reading_a_checkpoint_executes_nothing(tmp_path, where):
    path = stored({"x": torch.arange(6.0).view(2, 3)}, tmp_path)
    harm = Harm(tmp_path / "harm")
    if where == "inside":
        metadata = FileSystemReader(path).read_metadata()
        metadata.planner_data = harm
    (path / ".metadata").write_bytes(pickle.dumps(harm if where == "alone" else metadata))
    for reading in (lambda: described(path), lambda: read({"x": torch.empty(2, 3)}, path, alone=True)):
        with pytest.raises(ConfigError, match=r"its metadata asks for pathlib"):
            reading()
    assert not harm.path.exists()


def test_a_checkpoint_does_not_reach_out_of_its_folder(tmp_path):
    path = stored({"x": torch.ones(3)}, tmp_path)
    metadata = FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = f"../checkpoint/{place.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="no file of its folder"):
        described(path)


def test_another_topology_model_or_text_is_refused(tmp_path):
    made = checkpoint(tmp_path, 4)
    check_fits(made, IDENTITY, CONFIG)
    here = run_identity(dataclasses.replace(CONFIG, tp=2, layers=4), 256, "other")
    with pytest.raises(
        ConfigError, match=r"tp 1 there, 2 here; layers 8 there, 4 here; data text there, other here"
    ):
        check_fits(made, here, CONFIG)


def test_a_finished_run_is_not_resumed(tmp_path):
    with pytest.raises(ConfigError, match="nothing to resume"):
        check_fits(checkpoint(tmp_path, 10), IDENTITY, CONFIG)


def test_a_run_directory_with_checkpoints_is_not_overwritten(tmp_path):
    checkpoint(tmp_path, 4)
    with pytest.raises(ConfigError, match="holds the checkpoints of a run: go on with --resume auto"):
        prepare(["--out", str(tmp_path)])


def test_ranks_that_disagree_are_both_named():
    same = json.dumps({"lr": 0.1, "policy": "none"})
    check_agreement([same, same])
    with pytest.raises(MismatchError, match="disagree on policy: rank 0 has 'none', rank 2 has 'hybrid'"):
        check_agreement([same, same, json.dumps({"lr": 0.1, "policy": "hybrid"})])


def test_metrics_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "start"},
        *({"kind": "train", "step": s} for s in range(1, 6)),
        {"kind": "summary", "steps": 5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "train", "st')
    metrics = MetricsFile(path, resumed_at=3)
    metrics.write("train", {"step": 4, "loss": 1.0})
    metrics.close()
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e.get("step") for e in entries] == [None, 1, 2, 3, 4]
    assert entries[-1]["loss"] == 1.0


GOOD = b'{"kind": "start"}\n{"kind": "train", "step": 1}\n'


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (b'{"kind": "train", "st', "line 3, column 19: not JSON"),
        (b'{"kind": "train", "a": "\xff"}', "line 3, column 25: not UTF-8"),
        (b"[]", "line 3: must be an object, not []"),
        (b'{"step": 1}', "line 3: key kind is missing"),
        (b'{"kind": 3}', "line 3: key kind must be text, not 3"),
        (b'{"kind": "train", "step": "x"}', "line 3: key step must be a finite number, not 'x'"),
        (b'{"kind": "train", "step": 1e999}', "line 3: key step must be a finite number, not inf"),
        (b"[" * 10_000, "line 3, column 101: nested too deep"),
        (b"\0" * 500, "line 3, column 1: not JSON"),  # what a file system leaves after a loss of power
    ],
)
def test_damaged_lines_of_metrics_are_left_out_and_kept_beside(tmp_path, capsys, line, where):
    path = tmp_path / "metrics.jsonl"
    damaged = GOOD + line + b'\n{"kind": "train", "step": 2}\n'
    path.write_bytes(damaged)
    MetricsFile(path, resumed_at=3).close()
    assert path.read_bytes() == GOOD + b'{"kind": "train", "step": 2}\n'
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    told = capsys.readouterr().err
    assert told.startswith(f"hybridcomp train: warning: {path}: ")
    assert where in told
    assert told.endswith(f": now {path}.damaged\n")
    assert told.count("\n") == 1
    path.write_bytes(damaged)  # and once more: what was kept stays
    MetricsFile(path, resumed_at=3).close()
    assert {one.name for one in tmp_path.iterdir()} == {
        "metrics.jsonl",
        *(f"metrics.jsonl.damaged{n}" for n in ("", 1)),
    }


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)], ids=["folder", "pipe", "loop"]
)
def test_what_stands_in_the_place_of_metrics_is_put_aside(tmp_path, capsys, make):
    path = tmp_path / "metrics.jsonl"
    make(path)
    MetricsFile(path, resumed_at=3).close()
    assert path.read_bytes() == b""
    assert f"now {path}.damaged" in capsys.readouterr().err


def test_metrics_of_a_new_run_follow_no_link(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the only copy")
    (tmp_path / "metrics.partial").symlink_to(secret)
    (tmp_path / "metrics.jsonl").symlink_to(secret)
    for resumed_at in (None, 3):
        metrics = MetricsFile(tmp_path / "metrics.jsonl", resumed_at)
        metrics.write("train", {"step": 1})
        metrics.close()
    assert secret.read_text() == "the only copy"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"step": "INF"}, "key step must be an integer within 64 bits, not inf"),
        ({"step": -1}, "key step must not be negative"),
        ({"step": 2.5}, "key step must be an integer"),
        ({"elapsed": "INF"}, "key elapsed must be a finite number"),
        ({"policy": None}, "key policy must be text"),
        ({"run": []}, "key run must be an object"),
        ({"files": []}, "key files must be an object"),
        ({"files": {"n" * 300: 3}}, "which is no name of a file"),
        ({"files": {"../../secret": 3}}, "which is no name of a file"),
        ({"files": {"": 3}}, "which is no name of a file"),
        ({"files": {"x\0y": 3}}, "which is no name of a file"),
        ({"files": {"x": {"bytes": 3}}}, "key files.x: key crc32 is missing"),
        ({"files": {"x": "3"}}, "key files.x: must be an object"),
        ({"files": {"\ud800": 3}}, "key files must be text"),
    ],
)
def test_a_record_with_wrong_values_is_passed_over_for_the_one_before(tmp_path, changes, what):
    """Records from before checksums are taken by their values, and anybody can write a right checksum."""
    older, newer = checkpoint(tmp_path, 4), checkpoint(tmp_path, 8)
    record = json.loads((newer.path / RECORD).read_text()) | {"files": {}} | changes
    for checksums in (True, False):
        del record["crc32"]
        if checksums:
            record["crc32"] = _own_checksum(record)
        (newer.path / RECORD).write_text(json.dumps(record).replace('"INF"', "1e999"))
        found = find_checkpoint(dataclasses.replace(CONFIG, resume="auto", out=str(tmp_path)))
        assert found.path == older.path
        (damage,) = found.passed_over
        assert what in damage
        assert str(newer.path / RECORD) in damage
        record["crc32"] = ""


def test_a_new_run_starts_its_metrics_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')
    MetricsFile(path, resumed_at=None).close()
    assert path.read_text() == ""
