"""Helpers that programs that check on several ranks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp_lab.train.start import prepare
from hybridcomp_lab.train.topology import Topology, make_topology
from hybridcomp_lab.train.trainer import process_group


def tell(cases: int, problems: list[str]) -> None:
    """Say how many problems all ranks have found; collective."""
    bad = torch.tensor([len(problems)])
    dist.all_reduce(bad)
    if dist.get_rank() == 0:
        print(f"{cases} cases, {int(bad)} problems", flush=True)


def check_all(common: str, cases: list[str], check: Callable[[Any, Topology, int], list[str]]) -> list[str]:
    """Check each case's job, and say how many problems all ranks have found; collective.

    Args:
        common: flags of all jobs.
        cases: flags of each.
        check: returns this rank's problems with a job, given its mesh and its number.

    Returns:
        This rank's problems.
    """
    jobs = [prepare([*common.split(), *case.split()]) for case in cases]
    problems: list[str] = []
    with process_group(jobs[0]):
        rank = dist.get_rank()
        for number, (case, job) in enumerate(zip(cases, jobs, strict=True)):
            topology = make_topology(job.config.dp, job.config.pp, job.config.tp)
            problems += [f"rank {rank}: {case}: {p}" for p in check(job, topology, number)]
        tell(len(cases), problems)
    return problems
