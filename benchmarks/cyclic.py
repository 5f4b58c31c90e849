"""Balance of cyclic data parallelism: activations alive at once, and the rate of the links, beside data parallelism.

hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/cyclic.py --json benchmarks/results/schedules/cyclic_4hosts.json

One replica a host, one block a stage, as many stages as replicas; blocks sleep for a time-step in each pass, so that
all replicas "compute" at once on any machine; weights, messages and updates are those of `hybridcomp train`. Data
parallelism is DistributedDataParallel. Activations are counted from the begins and ends of all ranks' passes, links by
the kernel's counters. Fournier and Oyallon (arXiv 2403.08837) give (N + 1) / (2N) of the activations, and the same
traffic in every time-step. The weights, gradients and moments that a replica holds are counted in some more steps.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from mpi4py import MPI
from resultfile import write
from schedulebench.sleeping import job_of, sleeping_schedule
from schedulebench.timeline import Sampler, alive, gather, rates
from torch import Tensor

from hybridcomp_lab.train.pipelines.cyclic import alive as by_the_book
from hybridcomp_lab.train.pipelines.cyclic import handed, sent
from hybridcomp_lab.train.trainer import process_group

SCHEDULES = {
    "data parallel": "--schedule 1f1b",
    "data parallel, zero1": "--schedule 1f1b --shard zero1",
    "cdp-v1": "--schedule cdp-v1",
    "cdp-v2": "--schedule cdp-v2",
    "cdp-v1, stages": "--schedule cdp-v1 --shard stages",
    "cdp-v2, stages": "--schedule cdp-v2 --shard stages",
}
FIRST = 2  # steps that are not counted, in which connections are made and workers begin one after the other


@dataclass(frozen=True)
class Row:
    """Figures of one schedule.

    Attributes:
        schedule: name of the schedule, and what replicas share.
        step_seconds: mean of the counted steps.
        activations: activations of a stage and micro-batch alive at once on all replicas: the peak that lasts half a
            time-step.
        activations_mean: mean of that number over time.
        activations_rule: that peak by the schedule's time-steps.
        link_peak_over_mean: bytes of a link's busiest time-step over the mean: the largest of all links.
        total_peak_over_mean: the same for all links together.
        total_rule: the same by the schedule's time-steps, with messages of equal size.
        bytes_per_step: bytes that all links sent in a step.
        state_per_parameter: bytes of weights, gradients and moments that the fullest replica holds in a pass, over the
            model's parameters.
    """

    schedule: str
    step_seconds: float
    activations: int
    activations_mean: float
    activations_rule: int
    link_peak_over_mean: float
    total_peak_over_mean: float
    total_rule: float
    bytes_per_step: float
    state_per_parameter: float


def held() -> int:
    """Return the bytes of all tensors that Python refers to: all but the activations that autograd keeps."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def rule_of(schedule: str, size: int) -> list[int]:
    """Return the number of all replicas' messages in each time-step of a step."""
    at_once = "cdp-v2" in schedule
    if "cdp" not in schedule:
        return [1] + [0] * (2 * size - 1)
    return handed(size, by_stage=at_once) if "stages" in schedule else sent(size, at_once=at_once)


def measure(schedule: str, seconds: float, steps: int, width: int) -> Row:
    """Run one schedule; collective."""
    size = dist.get_world_size()
    job = job_of(
        f"--dp {size} --layers {size} --d-model {width} --heads 4 --seq-len 8 --micro-batch-size 1 --micro-batches 1 "
        f"{SCHEDULES[schedule]} --steps {steps} --bucket-mb 1000"
    )
    begun: list[float] = []
    spans: list[tuple[float, ...]] = []

    gc.collect()  # frees the schedule measured before
    before = held()
    most = 0

    def told(direction: str, began: float, ended: float) -> None:
        if weighs:
            nonlocal most
            most = max(most, held() - before)
        elif direction == "forward":
            begun.append(began)
        else:
            spans.append((begun.pop(), ended))  # backward passes go through the stages in reverse order

    weighs = False
    running = sleeping_schedule(job, (seconds, seconds), told)
    spans.clear()
    begun.clear()
    begins = []
    with Sampler(seconds / 8) as sampler:
        for step in range(steps):
            begins.append(time.monotonic())
            running.train(step, last=step == steps - 1)
    weighs = True  # after the timed steps, because it takes time
    for step in range(steps, steps + 4):
        running.train(step, last=step == steps + 3)
    parameters = sum(p.numel() for stage in running.run.model.stages for p in stage.plain.parameters())
    everyone = gather(MPI.COMM_WORLD, spans, 2)
    links = gather(MPI.COMM_WORLD, sampler.rows, 2)
    # The window begins when all ranks have begun a counted step, and ends when the first begins its last but one.
    starts = MPI.COMM_WORLD.allgather(begins)
    start, end = max(row[FIRST] for row in starts), min(row[-2] for row in starts)
    # The window is cut to whole steps, so that a mean over it is one of whole steps.
    step_seconds = (begins[-2] - begins[FIRST]) / (steps - FIRST - 2)
    count = max(1, int((end - start) / step_seconds))
    end = start + count * step_seconds
    peak, mean = alive(everyone, start, end, seconds / 20, seconds / 2)
    window = step_seconds / (2 * size)
    # Messages leave where one time-step ends and the next begins; the windows are centred on that.
    loads = [rates(samples, start + window / 2, end + window, window) for samples in links]
    total = sum(loads)
    messages = rule_of(schedule, size)
    return Row(
        schedule,
        step_seconds,
        peak,
        mean,
        max(by_the_book(size, cyclic="cdp" in schedule)),
        max(float(one.max() / one.mean()) for one in loads),
        float(total.max() / total.mean()),
        max(messages) * len(messages) / sum(messages),
        float(total.sum() / count),
        max(MPI.COMM_WORLD.allgather(most)) / parameters,
    )


def main() -> None:
    """Measure, print, and write JSON on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="of each schedule (default 10)")
    parser.add_argument("--milliseconds", type=float, default=100, help="of a time-step (default 100)")
    parser.add_argument(
        "--d-model", type=int, default=128, help="of the model: 48 d^2 bytes a stage (default 128)"
    )
    parser.add_argument("--json", type=Path, help="file to write to")
    arguments = parser.parse_args()
    if arguments.steps < FIRST + 4:
        parser.error(
            f"--steps must be at least {FIRST + 4}: the first {FIRST} and the last two are not counted"
        )
    size = MPI.COMM_WORLD.size
    if size < 2:
        parser.error("at least two ranks, each on a host of its own: hybridcomp lab -n 4 --rate 1gbit -- ...")
    with process_group(job_of(f"--dp {size} --micro-batches 1 --seq-len 8 --micro-batch-size 1")):
        rows = [
            measure(schedule, arguments.milliseconds / 1e3, arguments.steps, arguments.d_model)
            for schedule in SCHEDULES
        ]
        rank = dist.get_rank()
    if rank != 0:
        return
    base = rows[0]
    print(f"{size} replicas and stages, time-steps of {arguments.milliseconds:g} ms")
    print(f"{'schedule':>20} {'step ms':>8} {'activations':>12} {'rule':>5} {'x dp':>6} {'(N+1)/2N':>9} "
          f"{'link peak/mean':>15} {'all links':>10} {'rule':>6} {'MB a step':>10} {'B/parameter':>12}")  # fmt: skip
    for row in rows:
        print(f"{row.schedule:>20} {row.step_seconds * 1e3:>8.0f} {row.activations:>12} {row.activations_rule:>5} "
              f"{row.activations / base.activations:>6.3f} {(size + 1) / (2 * size):>9.3f} "
              f"{row.link_peak_over_mean:>15.2f} {row.total_peak_over_mean:>10.2f} {row.total_rule:>6.2f} "
              f"{row.bytes_per_step / 1e6:>10.2f} {row.state_per_parameter:>12.1f}")  # fmt: skip
    if arguments.json:
        values = {
            "replicas": size,
            "time_step_seconds": arguments.milliseconds / 1e3,
            "rows": [asdict(row) for row in rows],
        }
        write(arguments.json, values)
    wrong = [row.schedule for row in rows if row.activations != row.activations_rule]
    if wrong:
        sys.exit(
            f"other numbers of activations than the rule's: {', '.join(wrong)} (a loaded machine blurs them)"
        )


if __name__ == "__main__":
    main()
