"""Jobs that end by themselves: an all-reduce over all nodes, one rank a GPU, a sweep and the same sweep again."""

from __future__ import annotations

import re

import pytest

from tests.slurm.cluster import Cluster
from tests.train.harness import ROOT, TINY, metrics

pytestmark = pytest.mark.timeout(180)

ALL_REDUCE = (
    "slurm/allreduce.sbatch",
    *("--codec", "int8", "--size", "1M", "--iters", "1", "--warmup", "0"),
)


def completed(cluster: Cluster, job: str, *, log: str | None = None, seconds: float = 90) -> str:
    """Return what the job printed, once it has ended well."""
    found = cluster.wait(job, seconds)
    text = (cluster.work / (log or f"slurm-{job}.out")).read_text()
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), text
    return text


def test_an_all_reduce_over_four_nodes(cluster: Cluster) -> None:
    job = cluster.submit(*ALL_REDUCE)
    text = completed(cluster, job)
    assert f"job {job} on n[1-4], start 0" in text
    assert re.search(r"^.*\bint8:block=128\b.*$", text, re.MULTILINE), text
    assert re.search(r"\b4 ranks\b", text), text


def test_open_mpi_by_pmix(cluster: Cluster) -> None:
    """srun tells Open MPI 5 its ranks by PMIx alone."""
    if "pmix" not in cluster.command("srun", "--mpi=list"):
        pytest.skip("this Slurm was built without PMIx")
    openmpi = {"HYBRIDCOMP_VENV": str(ROOT / "build/openmpi"), "SLURM_MPI_TYPE": "pmix"}
    job = cluster.submit(*ALL_REDUCE, **openmpi)
    text = completed(cluster, job)
    assert re.search(r"\b4 ranks\b", text), text
    assert "Open MPI" in text, text


def test_every_rank_has_a_gpu_of_its_own(cluster: Cluster) -> None:
    job = cluster.submit("slurm/gpu.sbatch", "tests/slurm/which_gpu.py", HYBRIDCOMP_CUDA_AWARE="0")
    lines = completed(cluster, job).splitlines()[1:]
    assert sorted(line.split(": ")[1] for line in lines) == [
        f"n{n} {i} {i} 0 0" for n in (1, 2) for i in (0, 1)
    ]


def test_a_sweep_and_the_same_again(cluster: Cluster) -> None:
    submission = (
        "--array=0-1",
        "--nodes=2",
        "slurm/sweep.sbatch",
        *TINY.split(),
        "--steps",
        "3",
        "--dp",
        "2",
    )
    grid = {"POLICIES": "none int8:block=128", "SEEDS": "4", "SWEEP": "two"}
    runs = {policy: cluster.work / f"runs/two/{policy}-seed4" for policy in ("none", "int8_block=128")}
    array = cluster.submit(*submission, **grid)
    for task, run in enumerate(runs.values()):
        text = completed(cluster, f"{array}_{task}", log=f"slurm-{array}_{task}.out")
        assert re.search(r"^0: .*step 3/3", text, re.MULTILINE), text
        assert len(metrics(run, "train")) == 3
    written = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs.values()}
    again = cluster.submit(*submission, **grid)
    for task, run in enumerate(runs.values()):
        text = completed(cluster, f"{again}_{task}", log=f"slurm-{again}_{task}.out")
        assert f"{run.relative_to(cluster.work)} is done" in text
        assert (run / "metrics.jsonl").stat().st_mtime_ns == written[run]
