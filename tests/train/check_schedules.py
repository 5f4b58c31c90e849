"""Run on several ranks: does a schedule train as its rule says?

Arguments: cases as JSON, each the arguments of a run; all have the same backend and number of ranks. Every rank applies
the rule to the whole model by itself, in fp64, and compares its part: weights after every step, moments, losses, norms.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from hybridcomp.train.data import Batches
from hybridcomp.train.model import ModelShape, loss_of
from hybridcomp.train.parallel import build_model, rehearse
from hybridcomp.train.schedules import Run, make_schedule
from hybridcomp.train.start import prepare
from hybridcomp.train.topology import Topology, make_topology
from hybridcomp.train.trainer import process_group
from tests.train.reference import Reference, difference

COMMON = (
    "--policy none --d-model 24 --seq-len 8 --micro-batch-size 1 --eval-batches 5 --steps 5 --warmup-steps 2 "
    f"--lr 1e-2 --clip 0.5 --timeout 40 --data {Path(__file__)}"
)
RULES = {"2bw": "delayed", "cdp-v1": "delayed", "cdp-v2": "cdp-v2"}
DRAINED = (2, 4)  # what follows these steps sees an empty pipeline, as before a checkpoint
SPLIT_DIM = {"qkv": 0, "up": 0, "out": 1, "down": 1}
CLOSE = 1e-9  # fp64; a step moves weights by some 1e-2


def main(cases: list[str]) -> list[str]:
    torch.set_default_dtype(torch.float64)
    jobs = [prepare([*COMMON.split(), *case.split()]) for case in cases]
    problems: list[str] = []
    with process_group(jobs[0]):
        rank = dist.get_rank()
        for case, job in zip(cases, jobs, strict=True):
            topology = make_topology(job.config.dp, job.config.pp, job.config.tp)
            problems += [f"rank {rank}: {case}: {p}" for p in check(job, topology)]
        bad = torch.tensor([len(problems)])
        dist.all_reduce(bad)
        if rank == 0:
            print(f"{len(cases)} cases, {int(bad)} problems", flush=True)
    return problems


def check(job, topology: Topology) -> list[str]:
    config = job.config
    shape = ModelShape(256, config.layers, config.d_model, config.heads, config.seq_len)
    model = build_model(shape, config, job.policy, topology)
    rehearse(model, shape, config)
    batches = Batches(job.corpus, config)
    traffic = torch.zeros(2, 3, dtype=torch.int64)

    def batch(step: int, replica: int = topology.dp) -> torch.Tensor:
        return torch.from_numpy(batches.train(step, replica))

    schedule = make_schedule(Run(model, shape, config, topology, batch, lambda: traffic))
    rule = RULES.get(config.schedule, "fresh")
    reference = Reference(shape, config, rule)
    other = Reference(shape, config, "fresh" if rule != "fresh" else "delayed")
    for step in range(config.steps):
        for one in (reference, other):
            one.step([batch(step, replica) for replica in range(config.dp)])
    problems: list[str] = []
    if difference(reference.versions[-1], other.versions[-1]) < 1e4 * CLOSE:
        problems.append("the rules do not differ: this check could not fail")

    held_out = [torch.from_numpy(m) for m in batches.evaluate(topology.dp)]
    results = []
    for step in range(config.steps):
        last = step in DRAINED
        if step == 0 or step - 1 in DRAINED:
            compare_evaluation(problems, schedule, reference, step, held_out, topology)
        results += schedule.train(step, last=last)
        compare_weights(problems, schedule, reference, step, last, topology)
        if last and len(results) != step + 1:
            problems.append(f"{len(results)} results after step {step}, the last before a pause")
    for step, (result, loss, norm) in enumerate(zip(results, reference.losses, reference.norms, strict=True)):
        got = torch.tensor([result.step, result.loss, result.norm])
        if not torch.allclose(got, torch.tensor([step, loss, norm]), rtol=CLOSE):
            problems.append(f"step, loss, norm {got.tolist()} instead of {[step, loss, norm]}")
    compare_moments(problems, schedule, reference, topology)
    return problems


def part(name: str, whole: torch.Tensor, schedule, topology: Topology) -> torch.Tensor:
    """What this rank has of a tensor of the whole model."""
    if name not in schedule.run.model.split:
        return whole
    return whole.chunk(topology.sizes["tp"], SPLIT_DIM[name.split(".")[-2]])[topology.tp]


def compare_weights(problems, schedule, reference, step, last, topology: Topology) -> None:
    for name, parameter in schedule.updater.parameters.items():
        wanted = part(name, reference.versions[step + 1][name], schedule, topology)
        if not torch.allclose(parameter, wanted, rtol=0, atol=CLOSE):
            problems.append(f"{name} after step {step}: off by {(parameter - wanted).abs().max():.3g}")


def compare_moments(problems, schedule, reference, topology: Topology) -> None:
    for name, parameter in schedule.updater.parameters.items():
        wanted = reference.optimizer.state[reference.parameters[name]]["exp_avg"]
        got = schedule.updater.optimizer.state[parameter]["exp_avg"]
        if not torch.allclose(got, part(name, wanted, schedule, topology), rtol=0, atol=CLOSE):
            problems.append(f"{name}: other moments")


def compare_evaluation(problems, schedule, reference, step, micro, topology: Topology) -> None:
    loss = schedule.evaluate(micro)
    weights = reference.versions[step]
    with torch.no_grad():
        outputs = [torch.func.functional_call(reference.model, weights, (m[:, :-1],)) for m in micro]
        wanted = sum(loss_of(y, m[:, 1:]).item() for y, m in zip(outputs, micro, strict=True)) / len(micro)
    if abs(loss - (wanted if topology.is_last_stage else 0.0)) > CLOSE:
        problems.append(f"validation loss {loss} instead of {wanted} after {step} steps")


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(json.loads(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
