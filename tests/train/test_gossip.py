"""Replicas that gossip: graphs, what a run keeps and tells, and what is refused. Rules: tests/mpi/test_gossip.py."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.gossip.graph import Graph, make_graph
from hybridcomp_lab.train.reading import parse
from hybridcomp_lab.train.sync import parse_sync
from tests.train.harness import TINY, metrics, train
from tests.train.same import losses, stored, unequal


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("text", ["ring", "complete"])
def test_matrices_mix_and_keep_the_mean(text: str, ranks: int) -> None:
    graph = make_graph(text, ranks)
    matrix = graph.matrix
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix.sum(1), 1)
    assert (matrix.diagonal() > 0).all()
    assert [list(graph.weights(rank)) for rank in range(ranks)] == [
        [other for other in range(ranks) if other != rank and matrix[rank, other]] for rank in range(ranks)
    ]
    # The factor of fastest convergence makes the largest and the smallest eigenvalue that shrink equal in size.
    eigenvalues = np.sort(1 - graph.rate * np.linalg.eigvalsh(np.eye(ranks) - matrix))
    assert abs(eigenvalues[-1] - 1) < 1e-12
    assert ranks == 1 or abs(eigenvalues[0] + eigenvalues[-2]) < 1e-12


def test_rings_have_the_weights_and_factors_of_the_paper() -> None:
    assert make_graph("ring", 8).weights(0) == {1: 1 / 3, 7: 1 / 3}
    assert make_graph("ring", 8).rate == pytest.approx(1.308, abs=1e-3)
    assert make_graph("ring", 2).weights(1) == {0: 0.5}
    assert make_graph("ring", 2).edges == ((0, 1),)
    assert make_graph("ring", 1) == Graph(1, ())
    assert make_graph("ring", 1).weights(0) == {}


def test_edges_go_both_ways() -> None:
    graph = make_graph("2-1, 0-1,1-3", 4)
    assert graph.edges == ((0, 1), (1, 2), (1, 3))
    assert graph.neighbours(1) == [0, 2, 3]
    assert graph.weights(3) == {1: 0.25}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("star", "must be ring, complete, or edges such as 0-1,1-2, not 'star'"),
        ("0-1,1-2,2", "not '2'"),
        ("0-1,1-1,1-2,2-3", "1-1 leads from a rank to itself"),
        ("0-1,1-2,2-4", "2-4 names rank 4, and they are 0 to 3"),
        ("0-1,1-2,2-1,2-3", "the edge 1-2 stands there twice"),
        ("0-1,2-3", "no edges lead from rank 0 to rank 2"),
        ("0-1,1-2", "no edges lead from rank 0 to rank 3"),
    ],
)
def test_a_wrong_graph_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_graph(text, 4)


def test_values_with_commas_are_read() -> None:
    sync = parse_sync("gossip:method=choco,graph=0-1,1-2,codec=topk:ratio=0.1,values=bf16,gamma=0.5,every=2")
    assert vars(sync) == {
        "every": 2,
        "rule": "choco",
        "rank": 1,
        "codec": "topk:ratio=0.1,values=bf16",
        "gamma": 0.5,
        "graph": "0-1,1-2",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gossip:method=push", "method must be one of plain, powergossip, choco, not push"),
        ("gossip:rank=2", "rank is of method powergossip, not of plain"),
        ("gossip:method=powergossip,rank=0", "rank must be at least 1, not 0"),
        ("gossip:method=powergossip,gamma=0.1", "gamma is of method choco, not of powergossip"),
        ("gossip:method=choco,gamma=0", "gamma must be above 0, and at most 1, not 0.0"),
        ("gossip:method=choco,codec=nosuch", "codec nosuch: "),
        ("gossip:every=0", "every must be at least 1, not 0"),
        ("event:every=2", "'every=2' must be KEY=VALUE; keys: horizon, warmup, reach, stale, graph, reads"),
        ("event:horizon=1.5", "horizon must be from 0 to 1, not 1.5"),
        ("event:warmup=-1", "warmup must be at least 0, not -1"),
        ("event:reach=0", "reach must be positive and finite, not 0.0"),
        ("event:stale=drop", "stale must be one of mix, skip, pair, not drop"),
        ("event:reads=late", "reads must be one of ordered, free, not late"),
        ("gossip:2-3", "'2-3' must be KEY=VALUE; keys: every, method, rank, codec, gamma, graph"),
    ],
)
def test_a_wrong_gossip_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_sync(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dp 1 --sync gossip", "dp must be at least 2, not 1"),
        ("--dp 2 --sync gossip --backend gloo", "backend must be hybridcomp, not gloo"),
        ("--dp 2 --sync event --backend gloo", "backend must be hybridcomp, not gloo"),
        ("--dp 3 --sync gossip:graph=0-1", "no edges lead from rank 0 to rank 2"),
        ("--dp 2 --tp 2 --sync event:reads=free", "reads must be ordered, or tp 1, not 2"),
    ],
)
def test_what_does_not_go_with_gossip_is_named(arguments: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(arguments.split())


@pytest.mark.parametrize("arguments", ["--tp 2 --sync event", "--pp 2 --sync event:reads=free"])
def test_ranks_of_a_replica_go_with_events(arguments: str) -> None:
    parse(["--dp", "2", *arguments.split()])


RUN = (
    f"{TINY} --steps 8 --lr 1e-2 --warmup-steps 1 --checkpoint-every 5 --data text.txt --policy none "
    "--dp 3 --sync gossip:method=powergossip,graph=0-1,1-2"
)
EVENT = RUN.partition(" --dp")[0] + " --dp 2 --sync event:warmup=2,reach=1.5,stale=skip"


def run_twice(folder: Path, arguments: str) -> Path:
    """Run eight steps, and again from the fifth on."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    for out, more in (("run", ""), ("again", "--resume run/checkpoints/step-00000005")):
        done = train(f"{arguments} --out {out} {more}", folder)
        assert done.returncode == 0, done.stderr
        (folder / f"{out}.txt").write_text(done.stdout)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_twice(tmp_path_factory.mktemp("gossip"), RUN)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_of_events_has_the_same_bits(tmp_path: Path) -> None:
    run = run_twice(tmp_path, EVENT)
    assert losses(run)[5:] == losses(tmp_path / "again")
    ends = [stored(tmp_path / out / "checkpoints" / "step-00000008") for out in ("run", "again")]
    assert unequal(*ends) == []
    due, sent = sum(ends[0][f"pp0.tp0.schedule.dp{replica}.messages"] for replica in range(2)).tolist()
    (summary,) = metrics(run, "summary")
    assert summary["replicas"]["suppressed"] == pytest.approx(1 - sent / due)
    assert 0 < sent < due
    last = (tmp_path / "run.txt").read_text().splitlines()[-1]
    assert f"{100 * (1 - sent / due):.1f} % of messages suppressed" in last


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_has_the_same_bits(run: Path) -> None:
    again = run.parent / "again"
    assert losses(run)[5:] == losses(again)
    pause, *ends = (
        stored(folder / "checkpoints" / f"step-0000000{step}")
        for folder, step in ((run, 5), (run, 8), (again, 8))
    )
    assert unequal(*ends) == []
    assert [int(pause[f"pp0.tp0.schedule.dp{replica}.round"]) for replica in range(3)] == [5, 5, 5]
    names = {key.removeprefix("pp0.tp0.model.") for key in pause if ".model." in key}
    assert names
    distances, squares = 0.0, 0.0
    for name in names:
        parts = torch.stack([pause[f"pp0.tp0.dp{replica}.part.{name}"] for replica in range(3)]).double()
        assert torch.allclose(pause[f"pp0.tp0.model.{name}"].double(), parts.mean(0), atol=1e-6)
        distances += (parts - parts.mean(0)).square().sum().item()
        squares += parts.square().sum().item()
        ended = [ends[0][f"pp0.tp0.{kind}.{name}"] for kind in ("model", "dp0.part", "dp1.part", "dp2.part")]
        assert all(torch.equal(tensor, ended[0]) for tensor in ended)
    told = {row["step"]: row.get("replicas") for row in metrics(run, "train")}
    assert [step for step, replicas in told.items() if replicas] == [5, 8]
    assert told[5]["spread"] == pytest.approx(math.sqrt(distances / squares), rel=0.25)  # by a few parameters


def test_spread_and_bytes_are_told(run: Path) -> None:
    (summary,) = metrics(run, "summary")
    spread = summary["replicas"]["spread"]
    assert spread > 0.01
    assert f"replicas apart by {100 * spread:.3g} %" in (run.parent / "run.txt").read_text().splitlines()[-1]
    parameters = metrics(run, "start")[0]["parameters"]
    sent = [row["wire_bytes"]["dp"] for row in metrics(run, "train")]
    assert sent == sorted(sent)
    plain = [row["plain_bytes"]["dp"] for row in metrics(run, "train")]
    # Two edges, both ways; the average of all after the last step is in its row.
    assert plain[6] - plain[5] == 4 * 4 * parameters
    assert 0.01 < (sent[6] - sent[5]) / (plain[6] - plain[5]) < 0.05
