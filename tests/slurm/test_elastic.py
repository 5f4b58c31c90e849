"""A job array of replicas: a lost node ends one of them alone, which Slurm starts again, and it joins the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.train.harness import TINY, metrics_so_far

pytestmark = pytest.mark.timeout(400)
pytest.importorskip("torchft", reason="its wheels are for x86-64 alone")


def test_a_lost_node_ends_one_replica_alone(cluster: Cluster) -> None:
    run = f"{TINY} --steps 1000000 --digest-every 1 --timeout 10"
    job = cluster.submit("slurm/elastic.sbatch", *run.split(), TORCHFT_LIGHTHOUSE=cluster.lighthouse())
    out = cluster.work / f"runs/slurm-{job}"

    def lines(task: int) -> list[dict[str, Any]]:
        return metrics_so_far(out / f"{job}-{task}", "train")

    def until(met: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.1)

    def among(task: int, count: int) -> int:
        return sum(entry["replicas"] == count for entry in lines(task))

    try:
        until(lambda: among(3, 4) >= 5)
        where = {task: cluster.job(f"{job}_{task}")["NodeList"] for task in range(4)}
        (lost,) = (task for task, node in where.items() if node == "n2")
        (stays, *others) = (task for task in range(4) if task != lost)
        before = among(stays, 4)
        cluster.lose(2)
        try:
            until(lambda: among(stays, 3) >= 5)
        finally:
            cluster.recover(2, idle=False)
        until(lambda: among(stays, 4) >= before + 5)
        found = {task: cluster.job(f"{job}_{task}") for task in range(4)}
        assert {task: one["Restarts"] for task, one in found.items()} == {
            task: "1" if task == lost else "0" for task in range(4)
        }
        assert {one["JobState"] for one in found.values()} == {"RUNNING"}
    finally:
        cluster.command("scancel", job)
    digests: dict[int, set[str]] = {}
    for task in range(4):
        for entry in lines(task):
            digests.setdefault(entry["step"], set()).add(entry["digest"])
    assert {step for step, several in digests.items() if len(several) > 1} == set()
    assert len(others) == 2


def test_without_a_lighthouse_it_says_so(cluster: Cluster) -> None:
    job = cluster.submit("--array=0", "slurm/elastic.sbatch")
    found = cluster.wait(f"{job}_0", 60)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    assert "start torchft_lighthouse" in (cluster.work / f"slurm-{job}_0.out").read_text()
