"""Rules that adapt in the trainer: the steps of their decisions, and which of them a file can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.policy.adapt.decisions import read_decisions
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.start import read_policy
from tests.train.harness import TINY, metrics, train

SIDCO = """min_bytes = 256
dp.all_reduce = { codec = "sidco:ratio=0.05,stages=3", feedback = "ef", adapt = "sidco:every=2,drift=0.01"MORE }
"""


def run(folder: Path, policy: str, flags: str) -> Path:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    (folder / "policy.toml").write_text(policy)
    common = f"{TINY} --dp 2 --lr 1e-2 --warmup-steps 1 --data text.txt --policy policy.toml --out run"
    done = train(f"{common} {flags}", folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("before", ["none", "int8"])
def test_a_run_under_another_policy_goes_on_at_its_step(tmp_path: Path, before):
    """Steps are counted from the beginning of the run, whether or not a hook counted them before."""
    run(tmp_path, f'dp.all_reduce = "{before}"\n', "--steps 4 --checkpoint-every 4")
    policy = SIDCO.replace("MORE", ", warmup_steps = 5")
    out = run(tmp_path, policy, "--steps 10 --resume auto --freeze decided.toml")
    made = metrics(out, "decision")
    # The step after the fifth is the first whose messages are measured, if it is even from 0.
    assert {one["step"] for one in made if one["why"] != "first"} <= {9}
    assert any(one["step"] == 9 for one in made)
    assert {one["step"] for one in made if one["why"] == "first"} == {5}
    assert {one.step for one in read_decisions(tmp_path / "decided.toml")} == {0, 8}
    sent = [one["wire_bytes"]["dp"] for one in metrics(out, "train")]
    assert sent[5] - sent[4] < (sent[4] - sent[3]) / 3  # the sixth step is the first after the warm-up


@pytest.mark.timeout(120)
def test_decisions_of_rare_averages_are_shown_at_steps_of_training(tmp_path: Path):
    flags = "--steps 10 --sync local_sgd:every=3 --freeze decided.toml"
    out = run(tmp_path, SIDCO.replace("MORE", ""), flags)
    made = metrics(out, "decision")
    assert {one.step for one in read_decisions(tmp_path / "decided.toml")} == {0, 2}
    assert {one["step"] for one in made} == {3, 9}


def test_a_file_is_for_decisions_of_all_ranks(tmp_path: Path):
    policy = tmp_path / "policy.toml"
    policy.write_text(SIDCO.replace("MORE", ""))
    config = TrainConfig(policy=str(policy), dp=2, freeze=str(tmp_path / "decided.toml"), pp=2)
    with pytest.raises(ConfigError, match=r"with pp 2 .* decide apart, and only decisions of all ranks"):
        read_policy(config)
