"""Run on several ranks: do replicas that synchronise rarely, or gossip, train as the rule says?

Arguments: cases as JSON, each the arguments of a run; all have the same number of ranks. Every rank applies the rule to
the whole model of all replicas by itself, in fp64, and compares its part: parameters and global ones after every step,
losses, norms, evaluations.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybridcomp_lab.train.gossip.graph import make_graph
from hybridcomp_lab.train.model.gpt import ModelShape, loss_of
from hybridcomp_lab.train.optimizer.elastic import ElasticUpdater
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.sync import Event, parse_sync
from hybridcomp_lab.train.topology import Topology
from tests.train import mixing
from tests.train.checks import TEXT
from tests.train.checks.schedules import CLOSE, close, held
from tests.train.reference import Reference
from tests.train.tally import check_all

COMMON = (
    "--policy none --d-model 16 --heads 2 --seq-len 8 --micro-batch-size 1 --eval-batches 2 --steps 7 --warmup-steps 2 "
    f"--lr 1e-2 --clip 0.5 --timeout 40 --data {TEXT}"
)
PAUSES = (2, 4)  # steps after which an evaluation follows
Weights = dict[str, torch.Tensor]


class Replicas:
    """Local SGD and streaming DiLoCo by their formulas, on the whole models of all replicas.

    Attributes:
        whole: parameters that the replicas have agreed on.
        models: model of each replica.
    """

    def __init__(self, config, shape, fragment_of: dict[str, int]) -> None:
        self.sync, self.steps = parse_sync(config.sync), config.steps
        self.models = [Reference(shape, config, "fresh") for _ in range(config.dp)]
        self.whole = self.models[0]._copy()
        self.momentum = {name: torch.zeros_like(p) for name, p in self.whole.items()}
        self.fragment_of = fragment_of
        self.sent: Weights = {}
        self.step = 0

    def train(self, batches: list[torch.Tensor]) -> None:
        train_each(self.models, batches)
        self.step += 1
        for name, fragment in self.fragment_of.items():
            since = self.step - self.sync.every * (fragment + 1) // self.sync.fragments
            if since >= 0 and since % self.sync.every == 0:
                self.send(name)
            if since >= self.sync.delay and (since - self.sync.delay) % self.sync.every == 0:
                self.arrive(name)
        if self.step == self.steps:
            self.end()
        for model in self.models:
            model.versions[-1] = model._copy()

    def send(self, name: str) -> None:
        self.sent[name] = self.whole[name] - self.mean(name)

    def mean(self, name: str) -> torch.Tensor:
        return torch.stack([model.parameters[name].detach() for model in self.models]).mean(0)

    def arrive(self, name: str) -> None:
        sync, sent = self.sync, self.sent.pop(name)
        if sync.method == "local_sgd":
            self.take(name, self.whole[name] - sent, 0.0)
            return
        self.momentum[name] = sync.momentum * self.momentum[name] + sent
        self.take(name, self.whole[name] - sync.lr * (sent + sync.momentum * self.momentum[name]), sync.alpha)

    def take(self, name: str, whole: torch.Tensor, alpha: float) -> None:
        self.whole[name] = whole
        for model in self.models:
            p = model.parameters[name]
            p.data = alpha * p.data + (1 - alpha) * whole

    def end(self) -> None:
        """Apply what is under way, and then average the parameters."""
        for name in list(self.sent):
            self.arrive(name)
        for name in self.whole:
            self.take(name, self.mean(name), 0.0)


class ElasticReplicas(Replicas):
    """Replicas with different numbers of micro-batches, which count in a mean by what they trained on."""

    def __init__(self, config, shape, fragment_of: dict[str, int]) -> None:
        super().__init__(config, shape, fragment_of)
        self.config = config
        self.trained = [0] * config.dp
        self.shares = shares_of(config, 0)

    def train(self, batches: list[torch.Tensor]) -> None:
        for replica, (model, share) in enumerate(zip(self.models, self.shares, strict=True)):
            part = share / self.config.micro_batches
            rates = {"lr": part * self.config.lr, "min_lr": part * self.config.min_lr}
            model.config = dataclasses.replace(self.config, micro_batches=share, **rates)
            self.trained[replica] += share
        super().train(batches)
        if self.step % self.sync.every == 0:
            self.trained = [0] * len(self.trained)
            self.shares = shares_of(self.config, self.step)

    def mean(self, name: str) -> torch.Tensor:
        values = torch.stack([model.parameters[name].detach() for model in self.models])
        weights = torch.tensor(self.trained if any(self.trained) else self.shares, dtype=values.dtype)
        return torch.tensordot(weights / weights.sum(), values, 1)


def shares_of(config, step: int) -> tuple[int, ...]:
    """Return the micro-batches of each replica from a step on, by its definition."""
    sync = parse_sync(config.sync)
    if sync.shares:
        return tuple(map(int, sync.shares.split("-")))
    if sync.frozen:
        rows = [json.loads(line) for line in Path(sync.frozen).read_text().splitlines()]
        found = [(0, (config.micro_batches,) * config.dp)]
        found += [(row["step"], tuple(row["replicas"]["shares"])) for row in rows if row.get("replicas")]
        return max((at, shares) for at, shares in found if at <= step)[1]
    if step < sync.every:
        return (config.micro_batches,) * config.dp
    total = config.dp * config.micro_batches
    ways = itertools.product(range(sync.least, total), repeat=config.dp)
    # FakeClock: replica r takes r + 1 seconds for a micro-batch.
    seconds = {way: max(n * (r + 1) for r, n in enumerate(way)) for way in ways if sum(way) == total}
    return min(seconds, key=lambda way: (seconds[way], sorted(n * (r + 1) for r, n in enumerate(way))[::-1]))


class FakeClock:
    """A clock of a rank that goes by the micro-batches of its replica: a second more each for a later one."""

    def __init__(self, updater, replica: int) -> None:
        self.updater, self.replica, self.now, self.runs = updater, replica, 0.0, False

    def __call__(self) -> float:
        self.now += (self.replica + 1) * self.updater.shares[self.replica] if self.runs else 0.0
        self.runs = not self.runs
        return self.now


def train_each(models, batches: list[torch.Tensor]) -> None:
    for model, batch in zip(models, batches, strict=True):
        model.step([batch])


class Gossiping:
    """Gossip by its formulas (:mod:`tests.train.mixing`), on the whole models of all replicas.

    Attributes:
        whole: the mean of the replicas.
        models: model of each replica.
    """

    def __init__(self, config, shape, factors: mixing.Factors) -> None:
        self.sync, self.config = parse_sync(config.sync), config
        self.models = [Reference(shape, config, "fresh") for _ in range(config.dp)]
        graph = make_graph(self.sync.graph, config.dp)
        self.rule = mixing.Plain(graph)
        if isinstance(self.sync, Event):
            how = self.sync.horizon, self.sync.warmup, self.sync.reach, self.sync.stale
            self.rule = mixing.Event(graph, self.tensors(), *how)
        elif self.sync.rule == "choco":
            self.rule = mixing.Choco(graph, self.sync.codec, self.sync.gamma, self.tensors())
        elif self.sync.rule == "powergossip":
            self.rule = mixing.PowerGossip(graph, factors)
        self.step = 0

    def tensors(self) -> list[mixing.Weights]:
        return [{n: p.detach().numpy().copy() for n, p in m.parameters.items()} for m in self.models]

    def train(self, batches: list[torch.Tensor]) -> None:
        train_each(self.models, batches)
        self.step += 1
        if self.step % self.sync.every == 0:
            for model, mixed in zip(self.models, self.rule.mix(self.tensors(), self.step - 1), strict=True):
                for name, p in model.parameters.items():
                    p.data = torch.from_numpy(np.array(mixed[name]))
        names = self.models[0].parameters
        self.whole = {n: torch.stack([m.parameters[n].detach() for m in self.models]).mean(0) for n in names}
        for model in self.models:
            if self.step == self.config.steps:
                for name, p in model.parameters.items():
                    p.data = self.whole[name].clone()
            model.versions[-1] = model._copy()


def make_rule(job, schedule):
    """Make the rule of a case; collective."""
    told = [{}] * dist.get_world_size()
    config, shape, updater = job.config, ModelShape.of(job.identity), schedule.updater
    if not config.sync.startswith(("gossip", "event")):
        mine = {name: fragment.number for fragment in updater._sync.fragments for name in fragment.globals}
        dist.all_gather_object(told, mine)
        kind = ElasticReplicas if config.sync.startswith("elastic") else Replicas
        return kind(config, shape, {name: n for each in told for name, n in each.items()})
    has_factors = "powergossip" in config.sync
    dist.all_gather_object(told, mixing.first_factors(updater.rule) if has_factors else {})
    return Gossiping(config, shape, {key: factor for each in told for key, factor in each.items()})


def main(cases: list[str]) -> list[str]:
    torch.set_default_dtype(torch.float64)
    return check_all(COMMON, cases, lambda job, topology, _: check(job, topology))


def check(job, topology: Topology) -> list[str]:
    config, problems = job.config, []
    schedule = make_schedule(Run.of(job, topology))
    rule = make_rule(job, schedule)
    if isinstance(schedule.updater, ElasticUpdater):
        schedule.updater.clock = FakeClock(schedule.updater, topology.dp)
    held_out = [torch.from_numpy(m) for m in job.batches.evaluate(topology.dp)]
    results, apart = [], 0.0
    for step in range(config.steps):
        shares = getattr(rule, "shares", None)
        each = [job.batches.train(step, replica, shares) for replica in range(config.dp)]
        rule.train([torch.from_numpy(batch) for batch in each])
        last = step in PAUSES or step + 1 == config.steps
        results += schedule.train(step, last=last)
        if last and len(results) != step + 1:
            problems.append(f"{len(results)} results after step {step}, the last before a pause")
        if last:
            evaluate(problems, schedule, rule, step, held_out, topology)
        compare(problems, schedule, rule, step, topology, last)
        if getattr(rule, "shares", None) != getattr(schedule.updater, "shares", None):
            problems.append(f"shares {schedule.updater.shares} instead of {rule.shares} after step {step}")
        one, other = (model.parameters["head.weight"] for model in rule.models[:2])
        apart = max(apart, (one - other).abs().max().item())
    if apart < 1e4 * CLOSE:
        problems.append("replicas do not differ: this check could not fail")
    if isinstance(getattr(rule, "rule", None), mixing.Event):
        due, sent = (sum(counts) for counts in zip(*rule.rule.messages, strict=True))
        told = results[-1].replicas.suppressed
        if not 0 < sent < due or abs(told - (1 - sent / due)) > CLOSE:
            problems.append(f"{told} of messages suppressed, and {sent} of {due} sent")
    for step, result in enumerate(results):
        losses, norms = (
            torch.tensor([getattr(m, what)[step] for m in rule.models]) for what in ("losses", "norms")
        )
        got = torch.tensor([result.step, result.loss, result.norm])
        if not torch.allclose(
            got, torch.stack([torch.tensor(float(step)), losses.mean(), norms.mean()]), rtol=CLOSE
        ):
            problems.append(f"step, loss, norm {got.tolist()} instead of {step, losses.mean(), norms.mean()}")
    if max(norm for model in rule.models for norm in model.norms) < config.clip:
        problems.append("no gradient was clipped: this check says nothing of it")
    return problems


def compare(problems, schedule, rule, step: int, topology: Topology, evaluated: bool) -> None:
    model = rule.models[topology.dp]
    for what, mine, all_of_it in (
        ("parameter", schedule.updater.parameters, model.parameters),
        ("global", schedule.updater.whole, rule.whole),
    ):
        if what == "global" and isinstance(rule, Gossiping) and not evaluated:
            continue  # nobody has asked for the mean
        for name, tensor in mine.items():
            wanted = held(all_of_it[name].detach(), name, schedule, topology)
            if not close(tensor, wanted):
                problems.append(
                    f"{what} {name} after step {step}: off by {(tensor - wanted).abs().max():.3g}"
                )


def evaluate(problems, schedule, rule, step: int, micro, topology: Topology) -> None:
    mine = {name: p.detach().clone() for name, p in schedule.updater.parameters.items()}
    loss = schedule.evaluate(micro)
    with torch.no_grad():
        outputs = [torch.func.functional_call(rule.models[0].model, rule.whole, (m[:, :-1],)) for m in micro]
    wanted = sum(loss_of(out, m[:, 1:]).item() for out, m in zip(outputs, micro, strict=True)) / len(micro)
    if abs(loss - (wanted if topology.is_last_stage else 0.0)) > CLOSE:
        problems.append(f"validation loss {loss} instead of {wanted} after step {step}")
    if not all(torch.equal(p, mine[name]) for name, p in schedule.updater.parameters.items()):
        problems.append("an evaluation has changed parameters")


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(json.loads(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
