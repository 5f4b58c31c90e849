"""The layers of each stage on hosts that differ, and the order of those hosts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from hybridcomp.cli.main import main
from hybridcomp_lab.planner import hostorder
from hybridcomp_lab.planner.budget import NONE, policy_of
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.hostorder import faster_order
from hybridcomp_lab.planner.layouts import Wish
from hybridcomp_lab.planner.placement import cut_layers, predict_best_cut
from hybridcomp_lab.planner.plan import Plan, best_of
from hybridcomp_lab.planner.recompute import PLANNED, needed
from hybridcomp_lab.planner.search import find_plans
from hybridcomp_lab.planner.site import read_site
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.reading import parse
from hybridcomp_lab.train.start import read_policy

PLAIN = policy_of({})
MODEL = TrainConfig(layers=12, d_model=128, heads=4, seq_len=64, vocab_size=256, micro_batch_size=2)
SITE = """
version = 1
[cluster]
hosts = 4
ranks_per_host = 1
{more}
[compute]
flops = 1e11
bandwidth = 1e10
[network]
latency = 1e-4
bandwidth = 2.5e7
"""


def cluster(folder: Path, more: str = "", **changes) -> Cluster:
    (folder / "site.toml").write_text(SITE.format(more=more))
    return dataclasses.replace(read_site(str(folder / "site.toml")), **changes)


def said(arguments: str, capsys) -> str:
    assert main(["plan", *arguments.split()]) == 0
    return capsys.readouterr().out


def cuts(layers: int, ranks: int, least: int, most: int):
    for ends in itertools.combinations(range(1, layers), ranks - 1):
        cut = tuple(b - a for a, b in itertools.pairwise((0, *ends, layers)))
        if least <= min(cut) and max(cut) <= most:
            yield cut


# -- the recurrence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "ranks", "least", "most"),
    [(7, 1, 1, 7), (9, 3, 1, 9), (10, 4, 2, 10), (10, 4, 1, 3), (6, 6, 1, 6)],
)
def test_no_cut_is_better_than_the_recurrences(layers, ranks, least, most):
    source = random.Random(layers * ranks)
    for _ in range(20):
        costs = [source.choice((1.0, 1.0, 2.5, 0.1)) for _ in range(layers)]
        speeds = [source.choice((1.0, 0.5, 0.3)) for _ in range(ranks)]
        fixed = [source.choice((0.0, 0.7, 3.0)) for _ in range(ranks)]
        seconds = [[cost / speed for cost in costs] for speed in speeds]

        def taken(cut, seconds=seconds, fixed=fixed):
            ends = [0, *itertools.accumulate(cut)]
            parts = [sum(row[a:b]) for row, (a, b) in zip(seconds, itertools.pairwise(ends), strict=True)]
            found = [part + rest for part, rest in zip(parts, fixed, strict=True)]
            return round(max(found), 9), round(sum(part * part for part in found), 9)

        cut = cut_layers(seconds, fixed, least, most)
        assert sum(cut) == layers
        assert least <= min(cut)
        assert max(cut) <= most
        assert taken(cut) == min(map(taken, cuts(layers, ranks, least, most)))


def test_layers_that_cannot_be_cut_so_are_refused():
    with pytest.raises(ValueError, match="4 ranks with 1 to 2 layers each cannot have 9"):
        cut_layers([[1.0] * 9] * 4, [0.0] * 4, most=2)
    with pytest.raises(ValueError, match="cannot have 3"):
        cut_layers([[1.0] * 3] * 4, [0.0] * 4)


# -- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4},
        {"pp": 4, "schedule": "gpipe", "vocab_size": 4096},
        {"pp": 4, "schedule": "2bw"},
        {"pp": 4, "schedule": "local"},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 3, "dp": 2},
        {"pp": 2, "tp": 2, "recompute": "blocks"},
        {"pp": 4, "dp": 2},
        {"pp": 4, "tp": 2, "sequence_parallel": True},
    ],
)
def test_a_slow_host_gets_fewer_layers_and_the_step_is_faster(tmp_path, layout):
    config = dataclasses.replace(MODEL, micro_batches=8, **layout)
    hosts = cluster(tmp_path, ranks_per_host=config.ranks // 4, speeds=(1.0, 1.0, 1.0, 0.4))
    found, prediction = predict_best_cut(config, hosts, PLAIN)
    assert prediction == predict_step(found, hosts, PLAIN)
    assert prediction.seconds < 0.8 * predict_step(config, hosts, PLAIN).seconds
    layers = [sum(found.cut[pp :: config.pp]) for pp in range(config.pp)]
    assert sum(layers) == config.layers
    assert layers[-1] == min(layers) < config.layers // config.pp


def test_the_cut_is_about_the_best_of_all(tmp_path):
    hosts = cluster(tmp_path, hosts=3, speeds=(1.0, 0.5, 0.8), rates=(2.5e7, 2.5e7, 4e6))
    config = dataclasses.replace(MODEL, layers=9, pp=3, micro_batches=6)
    best = min(
        predict_step(dataclasses.replace(config, stage_layers=cut), hosts, PLAIN).seconds
        for cut in cuts(9, 3, 1, 9)
    )
    _, prediction = predict_best_cut(config, hosts, PLAIN)
    assert prediction.seconds <= 1.05 * best < 0.9 * predict_step(config, hosts, PLAIN).seconds


def test_a_fast_host_gets_no_more_layers_than_fit_its_memory(tmp_path):
    hosts = cluster(tmp_path, speeds=(1.0, 0.3, 0.3, 0.3))
    config = dataclasses.replace(MODEL, pp=4, micro_batches=4)
    free, fastest = predict_best_cut(config, hosts, PLAIN)
    again = dataclasses.replace(free, recompute="blocks")
    tight = dataclasses.replace(hosts, memory=0.99 * min(needed(free, PLAIN), needed(again, PLAIN)) / PLANNED)
    found, prediction = predict_best_cut(config, tight, PLAIN)
    assert needed(found, PLAIN) <= PLANNED * tight.memory
    assert config.layers // 4 < max(found.cut) < max(free.cut)
    assert fastest.seconds < prediction.seconds < predict_step(config, tight, PLAIN).seconds


def test_hosts_that_are_alike_have_the_plans_that_they_had(tmp_path):
    wish = Wish(MODEL, 32)
    plain = cluster(tmp_path, hosts=2, ranks_per_host=2)
    alike = dataclasses.replace(plain, speeds=(1.0, 1.0), rates=(2.5e7, 2.5e7))
    records = []
    for one in (plain, alike):
        plans = find_plans(wish, one, 9)
        assert not any(plan.config.stage_layers for plan in plans)
        records.append(json.dumps([plan.record(best_of(plans)) for plan in plans]))
        assert faster_order(plans[0], one) is None
    assert records[0] == records[1]
    assert "stage_layers" not in records[0]


def test_the_command_shows_and_writes_the_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster(tmp_path, "speeds = [1.0, 0.25, 1.0, 1.0]\nrates = [2.5e7, 2.5e7, 4e6, 2.5e7]")
    Path("model.toml").write_text("layers = 12\nd_model = 128\nheads = 4\nseq_len = 64\nvocab_size = 256\n")
    job = "--profile site.toml --model model.toml --batch 32 --top 2 --loss-budget exact"
    record = json.loads(said(f"{job} --json --write run.toml", capsys))
    cut = record["plans"][0]["stage_layers"]
    assert sum(cut) == 12
    assert min(cut) == cut[1]
    config = parse(["--config", "run.toml"])
    assert list(config.cut) == cut
    hosts = read_site("site.toml")
    even = dataclasses.replace(config, stage_layers=None)
    seconds, policy = record["plans"][0]["step_seconds"], read_policy(config)
    assert predict_step(config, hosts, policy).seconds == pytest.approx(seconds)
    assert seconds < predict_step(even, hosts, policy).seconds
    order = record["host_order"]
    text = said(f"{job} --explain", capsys)
    assert f" {' '.join(map(str, cut))} " in text
    assert f"Hosts in the order {' '.join(map(str, order['hosts']))} of the profile's" in text
    assert f"{order['seconds']:.3g} s a step of plan 1" in text
    assert "<td>layers of stages</td>" in Path("plan.html").read_text()


# -- the order of hosts -----------------------------------------------------------------------------------


def plan_of(config: TrainConfig, hosts: Cluster) -> Plan:
    found, prediction = predict_best_cut(config, hosts, PLAIN)
    return Plan(found, {"pp": NONE}, prediction)


def test_a_slow_link_is_better_at_an_end(tmp_path):
    rates = (2.5e7, 2e6, 2.5e7, 2.5e7)
    hosts = cluster(tmp_path, rates=rates)
    config = dataclasses.replace(MODEL, pp=4, micro_batches=4)
    order = faster_order(plan_of(config, hosts), hosts)
    assert order is not None
    assert sorted(order.hosts) == [1, 2, 3, 4]
    assert 2 in (order.hosts[0], order.hosts[-1])
    moved = dataclasses.replace(hosts, rates=tuple(rates[host - 1] for host in order.hosts))
    cut = dataclasses.replace(config, stage_layers=order.stage_layers)
    assert predict_step(cut, moved, PLAIN).seconds == order.seconds
    assert order.seconds < plan_of(config, hosts).prediction.seconds
    assert faster_order(plan_of(config, moved), moved) is None


def test_slow_hosts_belong_in_one_stage(tmp_path):
    hosts = cluster(tmp_path, speeds=(1.0, 0.5, 1.0, 0.5))
    plan = plan_of(dataclasses.replace(MODEL, pp=2, dp=2, micro_batches=4), hosts)
    order = faster_order(plan, hosts)
    assert order is not None
    assert {frozenset(order.hosts[:2]), frozenset(order.hosts[2:])} == {frozenset({1, 3}), frozenset({2, 4})}
    assert order.seconds < 0.9 * plan.prediction.seconds


def test_all_orders_that_differ_are_tried_once_where_they_are_few():
    a, b, c = (1.0, 1.0), (0.5, 1.0), (1.0, 0.5)
    kinds = [a, b, a, c]
    every = {tuple(kinds[host] for host in order) for order in hostorder._orders(kinds, 1)}
    assert every == set(itertools.permutations(kinds))
    assert len(hostorder._orders(kinds, 1)) == len(every) == 12
    pairs = [Counter(kinds[host] for host in order[:2]) for order in hostorder._orders(kinds, 2)]
    assert len(pairs) == 4  # two of one host, or one of each two: a a, a b, a c, b c
    assert all(pairs.count(pair) == 1 for pair in pairs)
    many = hostorder._orders([a, b, c] * 4, 1)
    assert len(many) == 5
    assert all(sorted(order) == list(range(12)) for order in many)
    last = [([a, b, c] * 4)[host] for host in many[-1]]
    assert last[0] == last[-1] == c  # the slowest links
