"""Cost of a pipeline's flush: steps of 1F1B, GPipe and PipeDream-2BW at depth 4, by the number of micro-batches.

mpiexec -n 4 python benchmarks/pipelines.py --json benchmarks/results/schedules/pipelines.json

Stages sleep for their passes, so that all ranks "compute" at once on any machine; weights, messages and updates are
those of `hybridcomp train`. Beside each: the limit, which is m passes without a flush and m + d - 1 with one, weight
versions and stashes as the schedule counted them, and how far the weights are from the schedule's rule applied in one
process, in fp64.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from resultfile import write

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the schedules' rules in tests/
from mpi4py import MPI
from schedulebench.sleeping import job_of, sleeping_schedule

from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.trainer import process_group
from tests.train.reference import Reference

SCHEDULES = ("1f1b", "gpipe", "2bw")
FIRST = 2  # steps that fill the pipeline and are not timed


@dataclass(frozen=True)
class Row:
    """Figures of one schedule and number of micro-batches.

    Attributes:
        schedule: name of the schedule.
        micro_batches: micro-batches in a step.
        step_seconds: median over the steps of the slowest rank.
        limit_seconds: seconds of the busiest rank's passes, with the waiting that the schedule cannot avoid.
        weight_versions: weight versions that each rank keeps.
        stashes: most stashes of each rank.
        weights_off: largest difference of a weight from the rule's after the last step.
    """

    schedule: str
    micro_batches: int
    step_seconds: float
    limit_seconds: float
    weight_versions: list[int]
    stashes: list[int]
    weights_off: float


def measure(schedule: str, micro_batches: int, passes: tuple[float, float], steps: int) -> Row:
    """Time one schedule; collective."""
    depth = dist.get_world_size()
    job = job_of(
        f"--pp {depth} --layers {depth} --d-model 32 --heads 2 --seq-len 16 --micro-batch-size 1 "
        f"--micro-batches {micro_batches} --schedule {schedule} --steps {steps} --lr 1e-3"
    )
    running = sleeping_schedule(job, passes)
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        running.train(step, last=step == steps - 1)
        seconds.append(time.perf_counter() - began)
    timed = torch.tensor(seconds[FIRST:-1])  # the last step empties a pipeline that has no flush
    dist.all_reduce(timed, dist.ReduceOp.MAX)
    batches = Batches(job.corpus, job.config)
    rule = Reference(running.run.shape, job.config, "delayed" if schedule == "2bw" else "fresh")
    for step in range(steps):
        rule.step([torch.from_numpy(batches.train(step, 0))])
    mine = running.updater.parameters
    off = max((p.detach() - rule.versions[-1][name]).abs().max().item() for name, p in mine.items())
    peaks = running.peaks()
    told = torch.tensor([float(peaks["weight_versions"]), float(peaks["stashes"]), off])
    everyone = [torch.empty_like(told) for _ in range(depth)]
    dist.all_gather(everyone, told)
    waits = 0 if schedule == "2bw" else depth - 1
    return Row(
        schedule,
        micro_batches,
        statistics.median(timed.tolist()),
        (micro_batches + waits) * sum(passes),
        [int(one[0]) for one in everyone],
        [int(one[1]) for one in everyone],
        max(float(one[2]) for one in everyone),
    )


def main() -> None:
    """Measure, check, print, and write JSON on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro-batches", default="4,8,32", help="of a step (default 4,8,32)")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default 8)")
    parser.add_argument(
        "--milliseconds", type=float, default=10, help="of a forward pass; backward takes twice that"
    )
    parser.add_argument("--json", type=Path, help="file to write to")
    arguments = parser.parse_args()
    if arguments.steps < FIRST + 2:
        parser.error(f"--steps must be at least {FIRST + 2}: the first {FIRST} and the last are not timed")
    passes = (arguments.milliseconds / 1e3, 2 * arguments.milliseconds / 1e3)
    torch.set_default_dtype(torch.float64)
    rows: list[Row] = []
    size = MPI.COMM_WORLD.size
    with process_group(job_of(f"--pp {size} --layers {size} --micro-batches {size} --seq-len 16")):
        for micro_batches in (int(text) for text in arguments.micro_batches.split(",")):
            rows += [measure(schedule, micro_batches, passes, arguments.steps) for schedule in SCHEDULES]
        rank = dist.get_rank()
    if rank != 0:
        return
    wrong = [row for row in rows if row.weights_off > 1e-12 or max(row.stashes) > _most(row, size)]
    if wrong:
        raise SystemExit(f"other weights, or more stashes, than the rule's: {wrong}")
    print(f"{'m':>3} {'schedule':>9} {'step ms':>8} {'limit ms':>9} {'flush/2bw':>10} {'limit':>6} "
          f"{'versions':>9} {'stashes':>12} {'weights off':>12}")  # fmt: skip
    for row in rows:
        base = next(r for r in rows if (r.schedule, r.micro_batches) == ("2bw", row.micro_batches))
        print(f"{row.micro_batches:>3} {row.schedule:>9} "
              f"{row.step_seconds * 1e3:>8.1f} {row.limit_seconds * 1e3:>9.1f} "
              f"{row.step_seconds / base.step_seconds:>10.3f} {row.limit_seconds / base.limit_seconds:>6.3f} "
              f"{max(row.weight_versions):>9} {row.stashes!s:>12} {row.weights_off:>12.2g}")  # fmt: skip
    if arguments.json:
        values = {
            "depth": size,
            "pass_seconds": passes,
            "rows": [asdict(row) for row in rows],
        }
        write(arguments.json, values, "shared-memory")


def _most(row: Row, depth: int) -> int:
    """Return the most stashes that a schedule may have on a rank."""
    return row.micro_batches if row.schedule == "gpipe" else depth


if __name__ == "__main__":
    main()
