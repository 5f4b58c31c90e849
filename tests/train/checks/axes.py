"""Run on several ranks: compare ways to run the same training.

Arguments: cases as JSON, each the name of a function below and the arguments of the runs that it compares. All have the
same number of ranks.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

import hybridcomp.torch as hct
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.start import prepare
from hybridcomp_lab.train.topology import Topology, make_topology
from hybridcomp_lab.train.trainer import process_group
from tests.train.checks import TEXT
from tests.train.tally import tell

COMMON = (
    "--policy none --layers 4 --d-model 32 --heads 2 --seq-len 64 --micro-batch-size 2 --eval-batches 0 "
    f"--warmup-steps 2 --lr 1e-2 --timeout 40 --data {TEXT}"
)
STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """Result of a run on this rank: weights, losses and norms of the steps, statistics, and what is wrong.

    Attributes:
        compresses: whether its policy does.
        axes: axes that messages go over, of more than one rank.
    """

    compresses: bool
    axes: tuple[str, ...]
    weights: dict[str, torch.Tensor]
    results: list[tuple[int, float, float]]
    rows: list[hct.StatRow]
    problems: list[str]

    def total(self, axis: str, what: str) -> int:
        """Return calls or bytes of one axis."""
        return sum(getattr(row, what) for row in self.rows if row.axis == axis)


def outcome(job, topology: Topology) -> Outcome:
    schedule = make_schedule(Run.of(job, topology))
    results = []
    for step in range(STEPS):
        results += schedule.train(step, last=step in (0, STEPS - 1))
        hct.advance_step()
        if step == 0:
            hct.reset_stats()  # drop a few bytes by which PyTorch's pipelines get to know each other
    rows = hct.stats()
    model = schedule.run.model
    problems = differing(schedule.updater.parameters, model.split, model.apart, topology)
    weights = {name: p.detach().clone() for name, p in schedule.updater.parameters.items()}
    told = [(r.step, r.loss, r.norm) for r in results]
    # The experts' axis is no field: it has as many ranks as divide both.
    axes = tuple(axis for axis in job.config.axes if getattr(job.config, axis, 2) > 1)
    return Outcome(job.policy.compresses, axes, weights, told, rows, problems)


def differing(parameters, split, apart, topology: Topology) -> list[str]:
    """Return problems: parameters that ranks should have alike to the bit, and have not."""
    problems = []
    for axis in ("dp", "tp"):
        for name, mine in parameters.items():
            if (axis == "tp" and name in split) or (axis == "dp" and name in apart):
                continue
            everyone = [torch.empty_like(mine, dtype=torch.int32) for _ in range(topology.sizes[axis])]
            dist.all_gather(everyone, mine.detach().view(torch.int32), group=topology.group(axis))
            if not all(torch.equal(other, everyone[0]) for other in everyone):
                problems.append(f"{name} differs over {axis}")
    return problems


def replicas_reduce_once(one: Outcome, many: Outcome) -> list[str]:
    """Whether the replicas' gradients are reduced in the last of many micro-batches alone."""
    calls = [run.total("dp", "calls") for run in (one, many)]
    sent = [run.total("dp", "plain_bytes") for run in (one, many)]
    if calls[0] != calls[1] or not calls[0] or sent[0] != sent[1]:
        return [f"{calls} reductions of {sent} bytes"]
    return []


def bf16_is_near_and_half_as_long(wide: Outcome, narrow: Outcome) -> list[str]:
    """Whether two runs lose nearly the same, and the second one sends half as much over pp and tp."""
    problems = []
    for (step, a, _), (_, b, _) in zip(wide.results, narrow.results, strict=True):
        if not 0 < abs(a - b) < 0.01 * a:
            problems.append(f"loss {b} instead of {a} in step {step}")
    for axis in ("pp", "tp", "ep"):
        sent = [run.total(axis, "wire_bytes") for run in (wide, narrow)]
        if sent[0] != 2 * sent[1] or (axis in wide.axes and not sent[0]):
            problems.append(f"{sent} bytes over {axis}")
    if {w.dtype for w in narrow.weights.values()} != {torch.float32}:
        problems.append("weights are not fp32")
    return problems


def bits_are_equal(*runs: Outcome) -> list[str]:
    """Whether all runs computed the same, to the bit."""
    first, *others = runs
    problems = []
    for other in others:
        problems += [f"{k} differs" for k, w in first.weights.items() if not torch.equal(w, other.weights[k])]
        if first.results != other.results:
            problems.append(f"{other.results} instead of {first.results}")
    return problems


def recomputed_bits_are_equal(kept: Outcome, recomputed: Outcome) -> list[str]:
    """Check the same, where more messages of tp are sent: a policy takes those for forward ones."""
    calls = [run.total("tp", "calls") for run in (kept, recomputed)]
    if not kept.rows or calls[0] >= calls[1]:
        return [f"{calls} messages over tp"]
    if recomputed.compresses and not any(r.axis == "tp" and r.codec != "none" for r in recomputed.rows):
        return ["nothing was compressed"]
    codecs = [{(row.op, row.codec) for row in run.rows} for run in (kept, recomputed)]
    different = [] if codecs[0] == codecs[1] else [f"messages went by {codecs}"]
    return different + bits_are_equal(kept, recomputed)


def codes_are_summed(alone: Outcome, *together: Outcome) -> list[str]:
    """Check that autoencoders train over tp as they do where nothing is summed."""
    problems = []
    for run in together:
        for (step, a, n), (_, b, m) in zip(alone.results, run.results, strict=True):
            if abs(a - b) > 1e-5 * a or abs(n - m) > 1e-4 * n:
                problems.append(f"loss {b} and norm {m} instead of {a} and {n} in step {step}")
        codes = [name for name in run.weights if ".code." in name]
        far = (
            n
            for n in codes
            if n in alone.weights and not torch.allclose(alone.weights[n], run.weights[n], atol=1e-4)
        )
        problems += [f"{name} differs" for name in far] + ["there are no codes"] * (not codes)
    return problems


def sends_shrink(all_values: Outcome, tenth: Outcome) -> list[str]:
    """Check that stages send a tenth of the values, each with two bytes of its place at most, and little else."""
    sends = [[row for row in run.rows if (row.axis, row.op) == ("pp", "send")] for run in (all_values, tenth)]
    plain = [sum(row.plain_bytes for row in rows) for rows in sends]
    share = sum(row.wire_bytes for row in sends[1]) / plain[1]
    # Within a quarter of a tenth; a value of bf16 has two bytes itself.
    return [] if plain[0] == plain[1] and 0.075 < share < 0.26 else [f"{share} of {plain} bytes were sent"]


def uneven_stages_train_alike(even: Outcome, uneven: Outcome) -> list[str]:
    """Check that another cut of the layers has other blocks, and the same losses and weights."""
    blocks = [
        {name.split(".")[1] for name in run.weights if name.startswith("blocks.")} for run in (even, uneven)
    ]
    problems = [] if blocks[0] != blocks[1] else [f"both have blocks {blocks[0]}"]
    shared = set(even.weights) & set(uneven.weights)
    far = (n for n in shared if not torch.allclose(even.weights[n], uneven.weights[n], atol=1e-5))
    problems += [f"{name} differs" for name in far]
    for (step, a, _), (_, b, _) in zip(even.results, uneven.results, strict=True):
        if abs(a - b) > 1e-5 * abs(a):
            problems.append(f"loss {b} instead of {a} in step {step}")
    return problems


def pipeline_sends_half(whole: Outcome, half: Outcome) -> list[str]:
    """Whether stages send each other half as much."""
    sent = [run.total("pp", "wire_bytes") for run in (whole, half)]
    return [] if sent[0] == 2 * sent[1] > 0 else [f"stages were sent {sent} bytes"]


def main(cases: list[list[str]]) -> list[str]:
    jobs = [[prepare([*COMMON.split(), *run.split()]) for run in runs] for _, *runs in cases]
    problems: list[str] = []
    with process_group(jobs[0][0]):
        rank = dist.get_rank()
        for case, runs in zip(cases, jobs, strict=True):
            outcomes = []
            for job in runs:
                hct.set_policy(job.policy)
                topology = make_topology(job.config.dp, job.config.pp, job.config.tp)
                outcomes.append(outcome(job, topology))
            found = [p for run in outcomes for p in run.problems] + globals()[case[0]](*outcomes)
            problems += [f"rank {rank}: {case}: {p}" for p in found]
        tell(len(cases), problems)
    return problems


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(json.loads(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
