"""Run on four ranks: does a policy compress what its technique says, and does a resumed run go on, bit for bit?

Arguments: a folder for checkpoints; a policy; cases as JSON: the arguments of a run; what is expected on some axes: for
each rank of the pipeline how many messages of a step are compressed, and how many are not for a reason; that reason.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

import hybridcomp.torch as hct
from hybridcomp_lab.train.checkpoints.checkpoint import save_checkpoint
from hybridcomp_lab.train.checkpoints.resume import Checkpoint
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.start import prepare
from hybridcomp_lab.train.topology import Topology, make_topology
from hybridcomp_lab.train.trainer import process_group
from tests.train.checks.replicas import COMMON, TRAFFIC, check_resumed, tensors, trained
from tests.train.tally import tell

PAUSE, STEPS = 1, 3


def main(folder: Path, policy: str, cases: list) -> list[str]:
    jobs = [prepare([*COMMON.split(), *case[0].split(), "--policy", policy]) for case in cases]
    problems: list[str] = []
    with process_group(jobs[0]):
        rank = dist.get_rank()
        for number, ((arguments, wanted), job) in enumerate(zip(cases, jobs, strict=True)):
            topology = make_topology(job.config.dp, job.config.pp, job.config.tp)
            found = check(job, topology, folder / str(number), wanted)
            problems += [f"rank {rank}: {arguments}: {p}" for p in found]
        tell(len(cases), problems)
    return problems


def check(job, topology: Topology, folder: Path, wanted) -> list[str]:
    problems: list[str] = []
    gc.collect()  # a hook of the case before would be saved with this one's
    checkpoint = Checkpoint(folder / f"step-{PAUSE:08d}", PAUSE, 0.0, job.policy.digest, {})
    schedule = make_schedule(Run.of(job, topology))
    hct.reset_stats()
    results = []
    for step in range(STEPS):
        results += schedule.train(step, last=step in (PAUSE - 1, STEPS - 1))
        hct.advance_step()
        if step == PAUSE - 1:
            save_checkpoint(checkpoint, trained(schedule), TRAFFIC, topology, keep=1)
    for axis, (compressed, spared, reason) in wanted.items():
        rows = [row for row in hct.stats() if row.axis == axis]
        got = (
            sum(row.calls for row in rows if row.codec != "none") / STEPS,
            sum(row.calls for row in rows if re.fullmatch(reason, row.reason)) / STEPS,
        )
        if got != (compressed[topology.pp], spared[topology.pp]):
            problems.append(
                f"{got} messages of axis {axis} were compressed and spared in a step, not "
                f"{compressed[topology.pp], spared[topology.pp]}: {rows}"
            )
    remembers = any("gradients of stage" in key for key in hct.state_dict())
    if remembers != (topology.pp > 0 or job.config.schedule == "interleaved"):
        problems.append(f"its sends have {'a' if remembers else 'no'} memory")
    whole = tensors(schedule)
    del schedule
    check_resumed(problems, checkpoint, job, topology, whole, results)
    return problems


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
