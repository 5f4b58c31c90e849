"""Runs of a study that never ran: a program that writes metrics in the trainer's own format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from hybridcomp_lab.study.plan import Run
from tests.demo.fake import lines

STUDY = """
title = "A & B"
hosts = 2
ppn = 1
[train]
dp = 2
layers = 1
[grid]
policy = ["none", "naive", "mine"]
[policies]
mine = 'dp.all_reduce = "int4"'
[loss]
seeds = [1, 2]
steps = 20
eval_every = 10
[speed]
rates = ["20mbit", "1gbit"]
rounds = 3
steps = 10
"""
# Program that writes what it is told on the first rank alone; told nothing, it ends as a run whose loss diverged.
PROGRAM = """
import os, pathlib, sys
if os.environ.get("PMI_RANK", "0") == "0":
    if not sys.argv[2]:
        sys.exit("DivergedError: the loss is nan")
    (pathlib.Path(sys.argv[1]) / "metrics.jsonl").write_text(sys.argv[2])
"""
SECONDS = {"none": 1.0, "naive": 0.4, "mine": 0.5}
LOSSES = {"none": 2.0, "naive": math.nan, "mine": 2.004}
BY_SEED = {"step": 0.01}  # that each seed is worse by than the one before


def write(folder: Path, text: str = STUDY) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


def command(self: Run, out: Path, policies: Mapping[str, Path]) -> list[str]:
    """Stand in for :meth:`Run.command`: each seed is worse than the last; the faster link halves every step's time."""
    name = self.variant.name
    if math.isnan(LOSSES[name]) and self.part == "loss":
        return ["python", "-c", PROGRAM, str(out), ""]
    seconds = SECONDS[name] / (2 if self.rate == "1gbit" else 1)
    loss = 2.0 if math.isnan(LOSSES[name]) else LOSSES[name] + BY_SEED["step"] * (self.number - 1)
    made = [json.loads(line) for line in lines(seconds, loss, 10 * SECONDS[name], steps=self.steps)]
    made[0]["config"] = {"seq_len": 128}
    return ["python", "-c", PROGRAM, str(out), "".join(json.dumps(row) + "\n" for row in made)]
