"""Run on several ranks: do streamed layers, beside AdamW, train as the rule says?

Arguments: cases as JSON, each the arguments of a run; all have the same number of ranks. Every rank applies the rule to
the gradients of the whole batch by itself, in fp64, and compares weights after every step, losses, norms and bytes.
"""

from __future__ import annotations

import json
import math
import sys
import warnings

import torch

from hybridcomp_lab.train.model.gpt import ModelShape
from hybridcomp_lab.train.optimizer.optimizers import learning_rate, make_optimizer, set_learning_rate
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.topology import Topology
from tests.torch.models.streaming import Rule
from tests.train.checks import TEXT
from tests.train.checks.schedules import CLOSE, close
from tests.train.reference import Reference
from tests.train.tally import check_all

COMMON = (
    "--policy none --d-model 16 --heads 2 --seq-len 8 --micro-batch-size 1 --eval-batches 0 --steps 6 --warmup-steps 2 "
    f"--lr 1e-2 --stream-lr 0.7 --clip 0.5 --timeout 40 --data {TEXT}"
)


class Streamed(Reference):
    """SGD by the rule of streaming on the weights that have bases, AdamW on all others."""

    def __init__(self, shape, config, rule: Rule) -> None:
        super().__init__(shape, config, "fresh")
        self.bases = rule
        formed = {name: p for name, p in self.parameters.items() if name not in rule.bases}
        self.optimizer = make_optimizer(formed, config)

    def step(self, batches: list[torch.Tensor]) -> None:
        t, config = len(self.versions) - 1, self.config
        for batch in batches:
            for micro in batch.chunk(config.micro_batches):
                weights = {name: p.clone().requires_grad_() for name, p in self.versions[t].items()}
                self._add_gradient(t, weights, micro, len(batches) * config.micro_batches)
        for name in self.bases.bases:
            p = self.parameters[name]
            p.grad = self.bases.direction(name, p.grad)
        self.norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters.values())))
        rate = learning_rate(config, t)
        set_learning_rate(self.optimizer, rate)
        scale = min(1.0, config.clip / self.norms[-1])
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.grad *= scale
                if name in self.bases.bases:  # they decay as AdamW's
                    p.sub_(rate * (config.weight_decay * p + config.stream_lr / config.lr * p.grad))
        self.optimizer.step()
        for p in self.parameters.values():
            p.grad = None
        self.versions.append(self._copy())


def main(cases: list[str]) -> list[str]:
    torch.set_default_dtype(torch.float64)
    return check_all(COMMON, cases, lambda job, topology, _: check(job, topology))


def check(job, topology: Topology) -> list[str]:
    config, problems = job.config, []
    schedule = make_schedule(Run.of(job, topology))
    updater = schedule.updater
    state = updater.state()
    bases = {n: tuple(state[f"stream.{n}.{side}"] for side in ("left", "right")) for n in updater.whole}
    rule = Streamed(ModelShape.of(job.identity), config, Rule(bases))
    kept = ["embed.tokens.weight"] if config.tie_embeddings else ["embed.tokens.weight", "head.weight"]
    expected = {
        name for name in rule.parameters if name.endswith("weight") and rule.parameters[name].dim() == 2
    }
    expected -= {kept[0], "embed.positions.weight"}
    if set(bases) != expected:
        problems.append(f"streams {sorted(bases)}, not {sorted(expected)}")
    mine = {**updater.parameters, **updater.whole}
    for step in range(config.steps):
        rule.step([torch.from_numpy(job.batches.train(step, replica)) for replica in range(config.dp)])
        (result,) = schedule.train(step, last=True)
        got, wanted = (torch.tensor([r.loss, r.norm]) for r in (result, As(rule, step)))
        if not torch.allclose(got, wanted, rtol=CLOSE):
            problems.append(f"loss, norm {got.tolist()} instead of {wanted.tolist()}")
        for name, p in mine.items():
            if not close(p, rule.parameters[name].detach()):
                problems.append(
                    f"{name} after step {step}: off by {(p - rule.parameters[name]).abs().max():.3g}"
                )
    if not any(norm > config.clip for norm in rule.norms):
        problems.append("no gradient was clipped: this check says nothing of it")
    factors = sum(8 * min(config.stream_rank, *p.shape) * sum(p.shape) for p in updater.whole.values())
    held = factors + sum(p.nbytes for p in updater.parameters.values())
    if updater.gradient_bytes != held:
        problems.append(f"gradients took {updater.gradient_bytes} bytes, not {held}")
    return problems


class As:
    """A step of the rule as a result has it."""

    def __init__(self, rule: Streamed, step: int) -> None:
        self.loss, self.norm = rule.losses[step], rule.norms[step]


if __name__ == "__main__":
    warnings.simplefilter("error")
    found = main(json.loads(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
