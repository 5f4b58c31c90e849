"""The trainer's schedules, on a small model whose blocks sleep in each pass.

Four stages that compute cannot overlap on two cores; four that sleep can. The schedule's own waiting is measured,
beside the messages, which are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp_lab.train.pipelines import Run, Schedule, make_schedule
from hybridcomp_lab.train.start import Job, prepare
from hybridcomp_lab.train.topology import make_topology

Told = Callable[[str, float, float], None]
"""Function of ``forward`` or ``backward`` and the seconds at which a block's pass began and ended."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: tuple[float, float], told: Told) -> Tensor:
        ctx.seconds, ctx.told = seconds, told
        _sleep("forward", seconds[0], told)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _sleep("backward", ctx.seconds[1], ctx.told)
        return gradients[0], None, None


def _sleep(direction: str, seconds: float, told: Told) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    told(direction, began, time.monotonic())


def job_of(arguments: str) -> Job:
    """Return a job of ``hybridcomp train`` that trains on this file, and neither clips nor evaluates."""
    common = f"--policy none --eval-batches 0 --clip 0 --timeout 60 --data {Path(__file__)} "
    return prepare((common + arguments).split())


def sleeping_schedule(job: Job, seconds: tuple[float, float], told: Told = lambda *_: None) -> Schedule:
    """Make the schedule that a job asks for; collective.

    Args:
        job: job of :func:`job_of`, whose process group is up.
        seconds: seconds that a block sleeps in a forward and in a backward pass.
        told: function that is told of each pass.
    """
    config = job.config
    run = Run.of(job, make_topology(config.dp, config.pp, config.tp))
    for stage in run.model.stages:
        for block in stage.plain.blocks.values():
            _slow(block, seconds, told)
    return make_schedule(run)


def _slow(block: nn.Module, seconds: tuple[float, float], told: Told) -> None:
    block.register_forward_hook(lambda _, __, output: _Sleep.apply(output, seconds, told))
