"""Run on several ranks: do replicas agree, and does a resumed run go on, bit for bit, where traffic is compressed?

Arguments: a folder for checkpoints; cases as JSON, each the arguments of a run. All have the same number of ranks.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import hybridcomp.torch as hct
from hybridcomp_lab.train.checkpoints.checkpoint import Trained, load_checkpoint, save_checkpoint
from hybridcomp_lab.train.checkpoints.resume import Checkpoint
from hybridcomp_lab.train.config import CYCLIC
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.pipelines.cyclic import is_fresh
from hybridcomp_lab.train.topology import Topology
from tests.train.checks import TEXT
from tests.train.tally import check_all

COMMON = (
    "--d-model 32 --heads 2 --seq-len 16 --micro-batch-size 1 --eval-batches 0 --warmup-steps 2 --lr 1e-2 "
    f"--timeout 40 --data {TEXT}"
)
PAUSE, STEPS = 3, 6
TRAFFIC = torch.zeros(2, 3, dtype=torch.int64)


def main(folder: Path, cases: list[str]) -> list[str]:
    return check_all(COMMON, cases, lambda job, topology, number: check(job, topology, folder / str(number)))


def check(job, topology: Topology, folder: Path) -> list[str]:
    problems: list[str] = []
    gc.collect()  # the memory of the case before is not of this one's checkpoint
    hct.reset_stats()
    checkpoint = Checkpoint(folder / f"step-{PAUSE:08d}", PAUSE, 0.0, job.policy.digest, {})
    schedule = make_schedule(Run.of(job, topology))
    used = watch(schedule) if job.config.shard == "stages" else None
    results = []
    for step in range(STEPS):
        if used is not None:
            used.step = step
        results += schedule.train(step, last=step in (PAUSE - 1, STEPS - 1))
        hct.advance_step()
        if step == PAUSE - 1:
            save_checkpoint(checkpoint, trained(schedule), TRAFFIC, topology, keep=1)
    whole = tensors(schedule)
    for name, mine in whole.items():
        if name in schedule.updater.apart:
            continue
        everyone = [torch.empty_like(mine, dtype=torch.int32) for _ in range(topology.sizes["dp"])]
        dist.all_gather(everyone, mine.view(torch.int32), group=topology.group("dp"))
        if not all(torch.equal(other, everyone[0]) for other in everyone):
            problems.append(f"replicas differ in {name}")
    # The policy compresses sends of replicas, their reductions and gathers, and what a pipeline sends backward.
    config, compressed = job.config, {"all_reduce": 0, "send": 0}
    for row in hct.stats():
        compressed[row.op] = compressed.get(row.op, 0) + row.calls * (row.codec != "none")
    sends = config.micro_batches * STEPS * sum(not s.is_first for s in schedule.run.model.stages)
    if schedule.run.model.apart and not compressed.get("all_to_all"):
        problems.append("no token was compressed")
    if config.schedule == "local" and compressed["send"]:
        problems.append(f"local updates sent {compressed['send']} messages backward")
    elif config.pp > 1 and config.schedule != "local" and compressed["send"] != sends:
        problems.append(f"compressed were {compressed['send']} sends, not the {sends} backward")
    elif used is not None:
        check_used(problems, used, config, topology)
        # The last worker's sum of its own stage goes nowhere. Two steps are warm-up, in the first case.
        sums = (config.dp - (topology.dp == config.dp - 1)) * (STEPS - 2)
        if compressed["send"] < sums:
            problems.append(f"compressed were {compressed['send']} sums, of {sums} at least")
    elif config.shard == "zero1":
        if not (compressed.get("reduce_scatter") and compressed.get("all_gather")):
            problems.append(f"compressed were {compressed}, not gradients and weights")
        if not any(key.startswith("zero:dp/residual") for key in hct.state_dict()):
            problems.append("no error of gradients is remembered")
    elif config.sync is not None and not any(key.startswith("sync:dp/residual") for key in hct.state_dict()):
        problems.append("no error of outer gradients is remembered")
    elif (config.pp > 1 or config.sync is not None) and not compressed["all_reduce"]:
        problems.append("no gradient was compressed")
    elif config.schedule in CYCLIC and topology.dp < config.dp - 1 and not compressed["send"]:
        problems.append("no partial sum was compressed")

    del schedule
    check_resumed(problems, checkpoint, job, topology, whole, results)
    return problems


class Used(dict):
    """Bits of the weights that each pass was run with, by step, worker and stage; and the step that runs."""

    step = 0


def watch(schedule) -> Used:
    """Note what the passes of a schedule that hands weights on are run with."""
    used, run = Used(), schedule._micro.run

    def watched(which, micro) -> None:
        bits = schedule._rooms[which.stage].flat.numpy().tobytes()
        used.setdefault((used.step, schedule._worker, which.stage), set()).add(hashlib.sha256(bits).digest())
        run(which, micro)

    schedule._micro.run = watched
    return used


def check_used(problems, used: Used, config, topology: Topology) -> None:
    """Check that all workers that see a version have its bits, in both passes."""
    everyone: list[Used | None] = [None] * config.dp
    dist.all_gather_object(everyone, dict(used), group=topology.group("dp"))
    seen: dict[tuple[int, int, bool], set[bytes]] = {}
    for worker_used in everyone:
        for (step, worker, stage), bits in worker_used.items():
            fresh = config.schedule == "cdp-v2" and is_fresh(worker, stage, config.dp)
            seen.setdefault((step, stage, fresh), set()).update(bits)
    problems += [f"weights of {key} have {len(bits)} bits" for key, bits in seen.items() if len(bits) > 1]
    if len({bits for group in seen.values() for bits in group}) < config.dp * (STEPS - 1):
        problems.append("the weights did not change: this check says nothing")


def check_resumed(problems, checkpoint: Checkpoint, job, topology: Topology, whole, results) -> None:
    """Check that a run that goes on from the checkpoint ends with the bits of the one that made it.

    Its schedule must be gone: its hook's memory belongs to the next one, as in a new process.
    """
    gc.collect()
    again = make_schedule(Run.of(job, topology))
    load_checkpoint(checkpoint, trained(again), topology, same_policy=True)
    again.resume(checkpoint.step)
    resumed = []
    for step in range(checkpoint.step, len(results)):
        resumed += again.train(step, last=step == len(results) - 1)
        hct.advance_step()
    for name, parameter in tensors(again).items():
        if not torch.equal(parameter, whole[name]):
            problems.append(f"{name} differs after the run was resumed")
    for a, b in zip(results[checkpoint.step :], resumed, strict=True):
        if (a.step, a.loss, a.norm) != (b.step, b.loss, b.norm):
            problems.append(f"resumed: {b} instead of {a}")


def tensors(schedule) -> dict[str, torch.Tensor]:
    """Return the parameters that the optimizer updates, and the whole ones that are made of them."""
    updater = schedule.updater
    found = {name: p.detach().clone() for name, p in updater.parameters.items()}
    return found | {f"whole {name}": p.detach().clone() for name, p in updater.whole.items()}


def trained(schedule) -> Trained:
    updater = schedule.updater
    buffers = schedule.run.model.buffers
    return Trained(
        updater.parameters, updater.optimizer, schedule.state(), updater.apart, updater.whole, buffers
    )


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
