"""Run on several ranks: train under policies that decide, where ranks measure unlike times, and compare copies.

Arguments: cases as JSON, each the arguments of a run, its steps, and whether its groups decide together.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch.distributed as dist

import hybridcomp.torch as hct
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.start import prepare
from hybridcomp_lab.train.topology import make_topology
from hybridcomp_lab.train.trainer import process_group
from tests.train.checks import TEXT
from tests.train.checks.axes import differing
from tests.train.tally import tell
from tests.unlike_times import unlike_times

COMMON = (
    "--layers 2 --d-model 128 --heads 2 --seq-len 16 --micro-batches 2 --micro-batch-size 1 --eval-batches 0 "
    f"--warmup-steps 2 --lr 1e-2 --timeout 40 --data {TEXT}"
)


def problems_of(arguments: str, steps: int, *, together: bool) -> list[str]:
    job = prepare([*COMMON.split(), *arguments.split()])
    hct.set_policy(job.policy)
    topology = make_topology(job.config.dp, job.config.pp, job.config.tp)
    schedule = make_schedule(Run.of(job, topology))
    hct.reset_stats()
    for step in range(steps):
        schedule.train(step, last=True)
        hct.advance_step()
    model = schedule.run.model
    apart = differing(model.parameters, model.split, model.apart, topology)
    rows = [row for row in hct.stats() if row.axis in ("dp", "embedding") and row.codec != "none"]
    if len({(row.codec, row.reason) for row in rows}) < 2:
        return [f"{arguments}: nothing was decided"]
    if together:
        return [f"{arguments}: {what}" for what in apart]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, apart)
    return [] if any(everyone) else [f"{arguments}: groups that measure unlike times decide alike"]


def main(cases: list[tuple[str, int, bool]]) -> list[str]:
    with process_group(prepare([*COMMON.split(), *cases[0][0].split()])), unlike_times():
        joint = hct.decide_together
        problems = []
        for arguments, steps, together in cases:
            hct.decide_together = joint if together else lambda *_: None
            problems += problems_of(arguments, steps, together=together)
        tell(len(cases), problems)
    return problems


if __name__ == "__main__":
    warnings.simplefilter("error")
    os.environ["HYBRIDCOMP_SUMMARY"] = "0"
    found = main(json.loads(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
