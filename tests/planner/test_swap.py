"""Estimates of what swapping would save in a plan that computes blocks again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from hybridcomp.cli.main import main
from hybridcomp_lab.planner.budget import policy_of
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.recompute import with_blocks
from hybridcomp_lab.planner.site import read_site
from hybridcomp_lab.planner.step.memory import block_activations
from hybridcomp_lab.planner.step.passes import pass_seconds
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.planner.step.stages import StageShape, stages_of
from hybridcomp_lab.planner.swap import Swapping, with_swapping
from hybridcomp_lab.train.config import TrainConfig

PLAIN = policy_of({})
MODEL = "layers = 8\nd_model = 64\nheads = 4\nseq_len = 32\nvocab_size = 256\n"
CONFIG = TrainConfig(layers=8, d_model=64, heads=4, seq_len=32, vocab_size=256, pp=2, micro_batches=4)
SITE = """
version = 1
[cluster]
hosts = 2
ranks_per_host = 1
swap = 1e12
[compute]
flops = 1e11
bandwidth = 1e10
[network]
latency = 1e-4
bandwidth = 2.5e7
"""


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "model.toml").write_text(MODEL)
    return read_site(str(tmp_path / "site.toml"))


def test_as_many_blocks_are_swapped_as_the_backward_pass_hides(cluster):
    config = with_blocks(CONFIG, 3)
    activations = block_activations(config)
    seconds = [predict_step(with_blocks(CONFIG, count), cluster, PLAIN).seconds for count in range(4)]
    for swapped in range(4):
        option = with_blocks(CONFIG, 3 - swapped)
        # The backward pass of the blocks it swaps hides nothing, and the stage that has less beside them is the one
        # that counts.
        beside = min(
            pass_seconds(stage, option, cluster.compute)[1] - swapped * _backward_of_a_block(stage, cluster)
            for stage in stages_of(option)
        )
        if swapped == 0:
            slow = dataclasses.replace(cluster, swap=1.0)
            assert with_swapping(config, slow, PLAIN) == Swapping(0, 3, seconds[3])
            continue
        enough = swapped * activations / beside
        for factor, blocks in ((1.001, swapped), (0.999, swapped - 1)):
            found = with_swapping(config, dataclasses.replace(cluster, swap=factor * enough), PLAIN)
            assert found == Swapping(blocks, 3, seconds[3 - blocks])
    assert seconds == sorted(seconds)


def _backward_of_a_block(stage: StageShape, cluster: Cluster) -> float:
    less = dataclasses.replace(stage, blocks=stage.blocks[1:])
    whole, without = (pass_seconds(one, CONFIG, cluster.compute)[1] for one in (stage, less))
    return whole - without


def test_slow_ranks_hide_more(cluster):
    config, activations = with_blocks(CONFIG, 4), block_activations(CONFIG)
    first = stages_of(CONFIG)[0]
    whole = pass_seconds(first, CONFIG, cluster.compute)[1]
    tight = dataclasses.replace(cluster, swap=4 * activations / whole)
    slow = dataclasses.replace(tight, speeds=(0.1, 0.1))
    assert with_swapping(config, tight, PLAIN).blocks < with_swapping(config, slow, PLAIN).blocks


def test_without_a_bandwidth_or_recomputation_nothing_is_predicted(cluster):
    assert with_swapping(CONFIG, cluster, PLAIN) is None
    assert with_swapping(with_blocks(CONFIG, 2), dataclasses.replace(cluster, swap=None), PLAIN) is None


def test_the_command_shows_it_and_writes_nothing_of_it(cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = "plan --profile site.toml --model model.toml --batch 64 --top 3 --memory 5M"
    assert main([*job.split(), "--json", "--write", "run.toml"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "swap" not in Path("run.toml").read_text()
    again = [n for n, plan in enumerate(record["plans"], 1) if plan["recompute"] == "blocks"]
    assert again
    assert [one["plan"] for one in record["swapping"]] == again
    best = min(record["swapping"], key=lambda one: one["seconds"])
    assert best["blocks"] == best["recomputed"]  # so fast a bandwidth hides all
    assert best["seconds"] < record["plans"][best["plan"] - 1]["step_seconds"]
    assert main(job.split()) == 0
    said = capsys.readouterr().out
    assert (
        f"With swapping, which the trainer does not do, plan {best['plan']} would take {best['seconds']:.3g} s"
        in said
    )


@pytest.mark.parametrize("wrong", ["0", "-1.0", "true", '"fast"'])
def test_a_wrong_bandwidth_is_named(tmp_path, wrong):
    path = tmp_path / "site.toml"
    path.write_text(SITE.replace("1e12", wrong))
    with pytest.raises(ValueError, match=r"cluster\.swap must be a number above 0"):
        read_site(str(path))
    with pytest.raises(ValueError, match="swap must be positive and finite"):
        dataclasses.replace(read_site_of(tmp_path), swap=math.inf)


def read_site_of(folder: Path) -> Cluster:
    (folder / "right.toml").write_text(SITE)
    return read_site(str(folder / "right.toml"))
