"""Run the trainer's command, and other programs, on several ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend fake)

from hybridcomp.launcher import find_mpiexec
from hybridcomp_lab.train.topology import Topology, make_topology
from tests.warm import python

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--layers 2 --d-model 32 --heads 2 --seq-len 32 --micro-batches 2 --micro-batch-size 2 --eval-batches 1"
)


@contextlib.contextmanager
def alone(rank: int, *, dp: int = 1, pp: int = 1, tp: int = 1) -> Iterator[Topology]:
    """Make one rank's mesh of groups without the other ranks: collectives return at once, and move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=dp * pp * tp, store=dist.HashStore())
    try:
        yield make_topology(dp, pp, tp)
    finally:
        dist.destroy_process_group()


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without traces of an MPI launcher, one thread a rank."""
    launcher = ("PMI", "MPI", "OMPI", "HYDRA", "SLURM", "HYBRIDCOMP")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | extra


def train(
    arguments: str, cwd: Path, *, timeout: float = 90, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run ``hybridcomp train`` as a user does, outside MPI."""
    return _run(_trainer(arguments), cwd, timeout, environment(**extra))


def train_inside(
    parts: list[tuple[int, str]], cwd: Path, *, timeout: float = 90
) -> subprocess.CompletedProcess[str]:
    """Run it under mpiexec: each part is a number of ranks and their arguments."""
    command = [find_mpiexec()]
    for ranks, arguments in parts:
        separator = [":"] if len(command) > 1 else []
        command += [*separator, "-n", str(ranks), *_trainer(arguments)]
    return _run(command, cwd, timeout, environment())


def under_mpiexec(arguments: str) -> list[str]:
    """Return what ``hybridcomp train`` becomes: mpiexec with a rank for each place of the mesh; one rank needs none."""
    words = arguments.split()
    sizes = [int(words[words.index(f"--{axis}") + 1]) for axis in ("dp", "pp", "tp") if f"--{axis}" in words]
    ranks = math.prod(sizes)
    return [*([find_mpiexec(), "-n", str(ranks)] if ranks > 1 else []), *_trainer(arguments)]


def _trainer(arguments: str) -> list[str]:
    return [python(), "-m", "hybridcomp", "train", *arguments.split()]


def run_ranks(
    ranks: int, script: Path, *arguments: str, timeout: float = 90
) -> subprocess.CompletedProcess[str]:
    """Run a program of the tests on ``ranks`` ranks."""
    command = [find_mpiexec(), "-n", str(ranks), python(), str(script), *arguments]
    return _run(command, ROOT, timeout, environment())


def _run(
    command: list[str], cwd: Path, timeout: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=timeout,
        check=False,
        restore_signals=False,  # as a lab starts programs
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def metrics_so_far(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind of a run that goes on: it may have none yet, and be writing one."""
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    entries = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [entry for entry in entries if entry["kind"] == kind]


def metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind of a run's metrics."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]
