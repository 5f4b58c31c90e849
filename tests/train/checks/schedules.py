"""Run on several ranks: does a schedule train as its rule says?

Arguments: cases as JSON, each the arguments of a run; all have the same backend and number of ranks. A rank applies the
rule to the whole model by itself, in fp64, each to the cases of its turn, and tells all; every rank compares its part:
weights after every step, moments, losses, norms.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings

import torch
import torch.distributed as dist

from hybridcomp_lab.train.model.gpt import ModelShape, loss_of
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.pipelines.cyclic import duties, totals_due
from hybridcomp_lab.train.start import prepare
from hybridcomp_lab.train.topology import Topology, make_topology
from hybridcomp_lab.train.trainer import process_group
from tests.train.checks import TEXT
from tests.train.reference import MEAN, LocalReference, Reference, difference
from tests.train.tally import tell

COMMON = (
    "--policy none --d-model 24 --seq-len 8 --micro-batch-size 1 --eval-batches 5 --steps 5 --warmup-steps 2 "
    f"--lr 1e-2 --clip 0.5 --timeout 40 --data {TEXT}"
)
RULES = {"2bw": "delayed", "cdp-v1": "delayed", "cdp-v2": "cdp-v2"}
DRAINED = (2, 4)  # steps after which the pipeline is empty, as before a checkpoint
DIFFERENT = 2  # after so many steps weights differ by rule
SPLIT_DIM = {"qkv": 0, "up": 0, "out": 1, "down": 1}
CLOSE = 1e-9  # fp64; a step moves weights by some 1e-2


def main(cases: list[str]) -> list[str]:
    torch.set_default_dtype(torch.float64)
    jobs = [prepare([*COMMON.split(), *case.split()]) for case in cases]
    problems: list[str] = []
    with process_group(jobs[0]):
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = {number: make_reference(jobs[number]) for number in range(rank, len(jobs), size)}
        for number, (case, job) in enumerate(zip(cases, jobs, strict=True)):
            told = [mine.get(number)]
            dist.broadcast_object_list(told, number % size)
            topology = make_topology(job.config.dp, job.config.pp, job.config.tp)
            problems += [f"rank {rank}: {case}: {p}" for p in check(job, topology, *told[0])]
        tell(len(cases), problems)
    return problems


def check(job, topology: Topology, reference, problems: list[str]) -> list[str]:
    config = job.config
    run = Run.of(job, topology)
    schedule = make_schedule(run)
    held_out = [torch.from_numpy(m) for m in job.batches.evaluate(topology.dp)]
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
    if config.clip and max(reference.norms) < config.clip:
        problems.append("no gradient was clipped: this check says nothing of it")
    for name, parameter in schedule.updater.parameters.items():
        wanted = part(reference.moment(original(name, config), topology.pp), name, schedule, topology)
        if not close(schedule.updater.optimizer.state[parameter][MEAN[config.optimizer]], wanted):
            problems.append(f"{name}: other moments")
    for border in config.neuron_borders:
        name = f"neurons.{border}.threshold"
        got, wanted = run.model.buffers.get(name), reference.kept.thresholds[config.steps][border]
        if got is not None and got.item() != wanted:
            problems.append(f"{name} is {got.item()}, not {wanted}")
    if config.tie_embeddings:
        compare_copies(problems, schedule)
    if config.shard == "zero1":
        check_shares(problems, schedule, topology)
    peaks = schedule.peaks()
    wanted_peaks = {"weight_versions": versions(config, topology), "stashes": stashes(config, topology)}
    if config.shard == "stages":
        # Stages in use, on their way here, and on their way from here, of which the last replica has none.
        wanted_peaks["stages"] = 3 - (topology.dp == config.dp - 1)
        check_owner(problems, schedule, topology)
    if peaks != wanted_peaks:
        problems.append(f"peaks are {peaks}, not {wanted_peaks}")
    return problems


def make_reference(job):
    """Apply the rule to all steps; return that, and problems: another rule has to give other weights."""
    config, shape, problems = job.config, ModelShape.of(job.identity), []
    rule = RULES.get(config.schedule, "fresh")
    batches = [
        [torch.from_numpy(job.batches.train(step, replica)) for replica in range(config.dp)]
        for step in range(config.steps)
    ]
    if config.schedule == "local":
        reference = LocalReference(shape, config)
        for batch in batches:
            reference.step(batch)
        return reference, problems
    reference, other = (
        Reference(shape, config, r) for r in (rule, "delayed" if rule == "fresh" else "fresh")
    )
    for step, batch in enumerate(batches):
        reference.step(batch)
        if step < DIFFERENT:
            other.step(batch)
    if config.experts and not all(mixture.passed_on for mixture in reference.mixtures):
        problems.append("experts took all tokens: this check says nothing of capacity")
    if config.pp_neurons and not all(0 < share < 0.5 for share in reference.kept.shares[-1].values()):
        problems.append("most values went on: this check says little of the others")
    if difference(reference, other) < 1e4 * CLOSE:
        problems.append("the rules do not differ: this check could not fail")
    if config.predict_weights:
        plain = Reference(shape, dataclasses.replace(config, predict_weights=False), rule)
        for batch in batches:
            plain.step(batch)
        if difference(reference, plain) < 1e4 * CLOSE:
            problems.append("predictions change nothing: this check could not fail")
    return reference, problems


def versions(config, topology: Topology) -> int:
    if config.schedule == "cdp-v2" and topology.dp == config.dp - 1 and config.shard == "none":
        return 1  # the last worker sees the newest weights of all stages
    return 2 + config.predict_weights if RULES.get(config.schedule) else 1


def stashes(config, topology: Topology) -> int:
    """Return how many forward passes wait for their backward pass at most, on this rank."""
    m, left = config.micro_batches, config.pp - topology.pp
    if config.schedule == "interleaved":
        ahead = (config.virtual_stages - 1) * (m // max(1, m // config.pp)) + 2 * (left - 1)
        return min(m * config.virtual_stages, ahead + 1)
    if config.schedule.startswith("cdp"):
        return config.dp
    return {"gpipe": m, "local": 1}.get(config.schedule, min(m, left))


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=0, atol=CLOSE)


def part(whole: torch.Tensor, name: str, schedule, topology: Topology) -> torch.Tensor:
    """Return the part that this rank updates of a tensor of the whole model."""
    mine = held(whole, name, schedule, topology)
    if name not in schedule.updater.whole:
        return mine
    size = math.ceil(mine.numel() / topology.sizes["dp"])
    return mine.flatten()[topology.dp * size :][:size]


def held(whole: torch.Tensor, name: str, schedule, topology: Topology) -> torch.Tensor:
    """Return the part that this rank computes with of a tensor of the whole model."""
    if name in schedule.run.model.apart:
        return whole.chunk(topology.sizes["dp"])[topology.dp]
    if name not in schedule.run.model.split:
        return whole
    return whole.chunk(topology.sizes["tp"], SPLIT_DIM[name.split(".")[-2]])[topology.tp]


def original(name: str, config) -> str:
    """Return a parameter's name in the whole model."""
    return "embed.tokens.weight" if config.tie_embeddings and name == "head.weight" else name


def compare_copies(problems, schedule) -> None:
    """Check that an embedding has the same bits in all stages that have it."""
    mine = schedule.updater.parameters
    copy = next(
        (mine[name].detach() for name in ("embed.tokens.weight", "head.weight") if name in mine), None
    )
    everyone: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if copy is None else copy.numpy().tobytes())
    if len({raw for raw in everyone if raw is not None}) != 1:
        problems.append("copies of the embedding differ")


def check_shares(problems, schedule, topology: Topology) -> None:
    """Check ZeRO: moments of a part of each parameter, and of nothing else; of all of it on all replicas."""
    updater, ranks = schedule.updater, topology.sizes["dp"]
    mean = MEAN[schedule.run.config.optimizer]
    moments = {name: updater.optimizer.state[p][mean] for name, p in updater.parameters.items()}
    kept = sum(moment.numel() for name, moment in moments.items() if name not in schedule.run.model.apart)
    sizes = [p.numel() for p in updater.whole.values()]
    whole, shares = sum(sizes), [math.ceil(size / ranks) for size in sizes]
    wanted = sum(max(0, min(n, size - topology.dp * n)) for n, size in zip(shares, sizes, strict=True))
    if kept != wanted or abs(kept - whole / ranks) > 0.02 * whole:
        problems.append(f"moments of {kept} elements, not {wanted}, of {whole} on {ranks} replicas")
    total = torch.tensor(kept)
    dist.all_reduce(total, group=topology.group("dp"))
    if int(total) != whole:
        problems.append(f"moments of {int(total)} elements on all replicas, not {whole}")


def check_owner(problems, schedule, topology: Topology) -> None:
    """Check shared stages: this replica has moments of its stage alone, and no weights but its own between steps."""
    module = schedule.run.model.stages[topology.sizes["dp"] - 1 - topology.dp].plain
    names = {name for name, _ in module.named_parameters()}
    if set(schedule.updater.parameters) != names or len(schedule.updater.optimizer.state) != len(names):
        problems.append(f"owned are {sorted(schedule.updater.parameters)}, not {sorted(names)}")
    if any(p.untyped_storage().nbytes() > p.element_size() for p in schedule.run.model.parameters.values()):
        problems.append("weights of others are held between steps")


def compare_weights(problems, schedule, reference, step, last, topology: Topology) -> None:
    name = schedule.run.config.schedule  # those that delay an update do the last one in a pause
    behind = name == "2bw" or (name.startswith("cdp") and topology.dp < topology.sizes["dp"] - 1)
    ahead = taken_in_the_step(schedule, topology)
    shared = schedule.run.config.shard == "stages"
    for name, parameter in schedule.updater.parameters.items():
        version = step if behind and not last and name not in ahead else step + 1
        if shared and not last:
            version = step - waits_for_norm(schedule, step, topology)
        whole = reference.weights(version, topology.pp)[original(name, schedule.run.config)]
        wanted = part(whole, name, schedule, topology)
        if not close(parameter, wanted):
            problems.append(f"{name} after step {step}: off by {(parameter - wanted).abs().max():.3g}")
    for name, parameter in schedule.updater.whole.items():
        wanted = held(reference.weights(step + 1, topology.pp)[name], name, schedule, topology)
        if not close(parameter, wanted):
            problems.append(
                f"{name}, whole, after step {step}: off by {(parameter - wanted).abs().max():.3g}"
            )


def waits_for_norm(schedule, step: int, topology: Topology) -> bool:
    """Whether an owner of a stage of cdp-v1 does the update of the step before in the step after this one."""
    if schedule.run.config.schedule == "cdp-v2" or step - 1 in (*DRAINED, -1):
        return False
    count = topology.sizes["dp"]
    return duties(count - topology.dp, count).on >= 2 * count


def taken_in_the_step(schedule, topology: Topology) -> set[str]:
    """Return the parameters that a worker of cdp-v2 updates by a step's totals before it ends that step."""
    if schedule.run.config.schedule != "cdp-v2" or schedule.run.config.shard == "stages":
        return set()
    due = totals_due(topology.dp + 1, topology.sizes["dp"], at_once=True)
    stages = [stage for stages in due[: len(due) // 2] for stage in stages]
    return {name for stage in stages for name in schedule.versions[stage - 1].leaves}


def compare_evaluation(problems, schedule, reference, step, micro, topology: Topology) -> None:
    loss = schedule.evaluate(micro)
    with torch.no_grad():
        wanted = sum(loss_of(reference.logits(step, m[:, :-1]), m[:, 1:]).item() for m in micro) / len(micro)
    if abs(loss - (wanted if topology.is_last_stage else 0.0)) > CLOSE:
        problems.append(f"validation loss {loss} instead of {wanted} after {step} steps")


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(json.loads(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
