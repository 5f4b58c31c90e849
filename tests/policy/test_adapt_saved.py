"""Decisions that are saved, loaded and repeated: by the right tensors, senders and steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybridcomp.policy.adapt.decisions import Decision, files, to_toml
from tests.policy import job as ranks
from tests.policy.job import DCT, SIDCO, Job, drawn, rule
from tests.policy.test_adapt import GRAVAC

SIDCO_4 = SIDCO.replace("0.01", "0.01,stages=4")
FROZEN = '{ codec = "topk:ratio=0.5", feedback = "ef", adapt = "frozen:FILE" }'


def resumed(first: Job, text: str, options: str) -> Job:
    """Return a new job that goes on from what the first one saves."""
    second = Job(*rule(text, options), drawn)
    for one, other in zip(first.each, second.each, strict=True):
        other.load_memory({key: array.copy() for key, array in one.memory().items()})
    return second


@pytest.mark.parametrize(("text", "options"), [(DCT, "check=50"), (SIDCO_4, "every=5")])
def test_a_job_saved_after_its_first_measured_step(text, options):
    whole, first = (Job(*rule(text, options), drawn) for _ in range(2))
    whole.run(0, 12)
    first.run(0, 1)
    second = resumed(first, text, options)
    second.run(1, 12)
    assert second.codecs == whole.codecs[1:]
    assert second.each[0].history() == whole.each[0].history()
    assert len(whole.each[0].history()) > (text != DCT)


def test_a_job_saved_after_a_step_of_more_tensors_than_before(monkeypatch: pytest.MonkeyPatch):
    options = "check=2,scope=tensor"

    def run(job: Job, first: int, last: int) -> None:
        for step in range(first, last):
            monkeypatch.setattr(ranks, "NAMES", ("second",) if step < 4 else ("first", "second"))
            job.run(step, step + 1)

    whole, first = (Job(*rule(DCT, options), drawn) for _ in range(2))
    run(whole, 0, 8)
    run(first, 0, 5)
    second = resumed(first, DCT, options)
    run(second, 5, 8)
    assert second.codecs == whole.codecs[5:]
    assert second.each[0].history() == whole.each[0].history()
    assert {decision.name for decision in second.each[0].history()} == {"first", "second"}


@pytest.mark.parametrize("at", [0, 10, 11, 12])
@pytest.mark.parametrize(
    ("text", "options"),
    [(GRAVAC, "eps=0.2,every=2,window=4"), (DCT, "check=2,every=3"), (SIDCO_4, "every=2,drift=0.05")],
)
def test_a_job_goes_back_to_a_state_in_the_same_process(text, options, at):
    """Nothing of the steps in between is left; no state at all is the state before the first step."""
    job = Job(*rule(text, options), drawn)
    job.run(0, at)
    saved = [one.memory() if at else {} for one in job.each]
    job.run(at, 25)  # a figure may be under way, and the last step measured
    wanted, history, version = job.codecs[at:], job.each[0].history(), job.each[0].version
    for one, arrays in zip(job.each, saved, strict=True):
        one.load_memory(arrays)
    assert job.each[0].version > version
    job.codecs.clear()
    job.run(at, 25)
    assert job.codecs == wanted
    assert job.each[0].history() == history
    assert len(history) > 2


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved | {"step": "STEP"},
        lambda saved: saved | {"history": [[1]]},
        lambda saved: saved | {"history": 3},
        lambda saved: saved | {"controller": []},
        lambda saved: saved | {"controller": {}},
        lambda saved: [saved],
        lambda saved: 7,
    ],
)
def test_saved_decisions_that_are_damaged_are_named(change):
    job = Job(*rule(SIDCO_4, "every=2,drift=0.05"), drawn)
    job.run(0, 6)
    arrays = job.each[0].memory()
    key = next(key for key, array in arrays.items() if array.tobytes().startswith(b"{"))
    text = json.dumps(change(json.loads(arrays[key].tobytes()))).replace('"STEP"', "1e999")
    for damaged in (text.encode(), text.encode()[:-3], 100_000 * b"[", b"\xff"):
        with pytest.raises(ValueError, match="cannot be those of its adapt"):
            job.each[0].load_memory(arrays | {key: np.frombuffer(damaged, np.uint8)})


def test_loaded_decisions_are_no_news():
    job = Job(*rule(SIDCO_4, "every=2,drift=0.05"), drawn)
    job.run(0, 5)
    assert job.each[0].news() == job.each[0].history() != []
    assert job.each[0].news() == []
    second = resumed(job, SIDCO_4, "every=2,drift=0.05")
    assert second.each[0].news() == []
    known = len(second.each[0].history())
    second.run(5, 30)
    assert second.each[0].news() == second.each[0].history()[known:] != []


# -- files ------------------------------------------------------------------------------------------------------


def frozen(folder: Path, decisions: list[Decision]) -> str:
    file = folder / "decided.toml"
    file.write_text(to_toml(decisions))
    return FROZEN.replace("FILE", str(file))


def test_frozen_decisions_of_a_resumed_job_and_of_one_that_goes_back(tmp_path: Path):
    made = [
        Decision(step, f"topk:ratio={ratio}:values=none") for step, ratio in ((0, 0.1), (3, 0.05), (6, 0.02))
    ]
    text = frozen(tmp_path, made)
    job = Job(*rule(text), drawn)
    job.run(0, 5)
    saved = job.each[0].memory()
    second = resumed(job, text, "")
    for _ in range(2):
        second.run(5, 6)
        assert second.each[0].history() == made[:2]
        second = resumed(second, text, "")
    job.run(5, 10)
    wanted = job.codecs[5:]
    for one in job.each:
        one.load_memory(saved)
    job.codecs.clear()
    job.run(5, 10)
    assert job.codecs == wanted == ["topk:ratio=0.05", *["topk:ratio=0.02"] * 4]
    late = Job(*rule(text), drawn)  # as where a job goes on under this policy
    late.run(8, 9)
    assert late.codecs == ["topk:ratio=0.02"]


def test_a_file_repeats_the_decisions_of_each_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two senders of one process write one file: each repeats its own decisions."""

    def flat(step: int, rank: int, name: str) -> np.ndarray:
        return np.ones(4000, np.float32)

    monkeypatch.setattr(files, "_sources", {})
    file = tmp_path / "decided.toml"
    found = rule(GRAVAC, f"eps=0.6,every=2,window=4,freeze={file}")
    jobs = [Job(*found, values, place=place) for place, values in enumerate((flat, drawn), 1)]
    for job in jobs:
        job.run(0, 20)
    files.write()
    wanted = [job.codecs for job in jobs]
    assert wanted[0] != wanted[1]
    repeated = rule(FROZEN.replace("FILE", str(file)).replace("0.5", "0.1"))
    for place, codecs in enumerate(wanted, 1):
        again = Job(*repeated, drawn, place=place)
        again.run(0, 20)
        assert again.codecs == codecs


@pytest.mark.parametrize(
    ("about", "repeats"),
    [
        ({}, True),
        ({"axis": "dp", "op": "all_reduce"}, True),
        ({"axis": "dp", "op": "all_reduce", "place": 1}, True),
        ({"axis": "zero", "op": "all_reduce"}, False),
        ({"axis": "dp", "op": "reduce_scatter"}, False),
        ({"place": 2}, False),
    ],
)
def test_decisions_about_others_are_not_repeated(tmp_path: Path, caplog, about, repeats):
    job = Job(*rule(frozen(tmp_path, [Decision(1, "topk:ratio=0.02", **about)])), drawn)
    job.run(0, 2)
    assert job.codecs[1] == ("topk:ratio=0.02" if repeats else "topk:ratio=0.5")
    assert ("no decision of the file to repeat is about it" in caplog.text) != repeats


def test_a_codec_of_a_file_that_cannot_carry_a_tensor(tmp_path: Path):
    job = Job(*rule(frozen(tmp_path, [Decision(0, "powersgd:rank=2")])), drawn)
    job.run(0, 1)
    assert job.codecs == ["topk:ratio=0.5"]
