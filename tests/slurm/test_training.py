"""A training job that is asked to stop, or loses a node, is queued again; it ends with the bits of a run left alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.train.harness import TINY, metrics
from tests.train.same import losses, stored, unequal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS = 300
POLICY = """
min_bytes = 512
[dp]
all_reduce = { codec = "int4:block=32", feedback = "ef" }
"""
NODES = ("--nodes=2", "--ntasks-per-node=1")  # of four: two are there for a job that has lost one
RUN = (
    f"{TINY} --dp 2 --pp 1 --tp 1 --policy policy.toml --steps {STEPS} --checkpoint-every 10 --warmup-steps 2"
)


class Training:
    """A job of train_gpt.sbatch."""

    def __init__(self, cluster: Cluster) -> None:
        (cluster.work / "policy.toml").write_text(POLICY)
        self._cluster = cluster
        self.job = cluster.submit(*NODES, "slurm/train_gpt.sbatch", *RUN.split())
        self.out = cluster.work / f"runs/slurm-{self.job}"
        self.log = cluster.work / f"slurm-{self.job}.out"

    def wait_for_a_checkpoint(self) -> None:
        deadline = time.monotonic() + 90
        while not list(self.out.glob("checkpoints/step-*")):
            assert time.monotonic() < deadline, f"no checkpoint within 90 s{self._cluster.logs()}"
            time.sleep(0.01)

    def complete(self, restarts: int) -> None:
        found = self._cluster.wait(self.job, 120)
        text = self.log.read_text()
        assert (found["JobState"], found["ExitCode"], found["Restarts"]) == (
            "COMPLETED",
            "0:0",
            str(restarts),
        ), text
        for start in range(restarts + 1):
            assert f", start {start}\n" in text
        assert text.count("0: resumed from") == restarts, text

    def last(self) -> Path:
        return self.out / f"checkpoints/step-{STEPS:08d}"


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Training:
    """A run that nothing disturbs."""
    training = Training(cluster)
    training.complete(restarts=0)
    assert len(metrics(training.out, "train")) == STEPS
    return training


def nodes(cluster: Cluster, training: Training) -> list[str]:
    """Return the nodes on which the job runs, or ran last."""
    return cluster.command("scontrol", "show", "hostnames", cluster.job(training.job)["NodeList"]).split()


def check_same(a: Training, b: Training) -> None:
    assert losses(a.out) == losses(b.out)
    assert unequal(stored(a.last()), stored(b.last())) == []


def test_asked_to_stop_it_is_queued_again_and_goes_on(cluster: Cluster, whole: Training) -> None:
    cut = Training(cluster)
    cut.wait_for_a_checkpoint()
    # Slurm does so before the time limit: the signal goes to the batch script alone.
    cluster.command("scancel", "--batch", "--signal=USR1", cut.job)
    cut.complete(restarts=1)
    text = cut.log.read_text()
    assert "0: asked to stop (SIGUSR1) after step" in text
    assert "asked to stop (code 75): back in the queue" in text
    check_same(cut, whole)


def test_preempted_it_stops_in_its_grace_time_and_goes_on(cluster: Cluster, whole: Training) -> None:
    cut = Training(cluster)
    cut.wait_for_a_checkpoint()
    # This job needs all nodes at once, and waits until the training has left two of them.
    urgent = cluster.command("srun", "--partition=urgent", "--nodes=4", "--exclusive", "hostname")
    assert sorted(urgent.split()) == ["n1", "n2", "n3", "n4"]
    cut.complete(restarts=1)
    assert "asked to stop (code 75): back in the queue" in cut.log.read_text()
    check_same(cut, whole)


def test_when_a_node_is_lost_it_is_queued_again_and_goes_on(cluster: Cluster, whole: Training) -> None:
    cut = Training(cluster)
    cut.wait_for_a_checkpoint()
    assert nodes(cluster, cut) == ["n1", "n2"]
    cluster.lose(2)
    try:
        cut.complete(restarts=1)
        assert len(nodes(cluster, cut)) == 2
        assert "n2" not in nodes(cluster, cut)
    finally:
        cluster.recover(2)
    check_same(cut, whole)
