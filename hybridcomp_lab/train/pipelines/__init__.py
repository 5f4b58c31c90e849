"""Provide the schedules of a training step, behind one interface: :class:`Schedule`.

docs/schedules.md lists them, with their effect on the weights and their costs.
"""

from __future__ import annotations

from hybridcomp_lab.train.config import CYCLIC
from hybridcomp_lab.train.pipelines.base import Run, Schedule
from hybridcomp_lab.train.pipelines.cdp import Cyclic
from hybridcomp_lab.train.pipelines.flushed import FlushedPipeline
from hybridcomp_lab.train.pipelines.handed import HandedOn
from hybridcomp_lab.train.pipelines.local import Local
from hybridcomp_lab.train.pipelines.loop import Loop
from hybridcomp_lab.train.pipelines.two_bw import TwoBW

__all__ = ["Run", "Schedule", "make_schedule"]


def make_schedule(run: Run) -> Schedule:
    """Make the schedule that the configuration asks for."""
    if run.config.schedule in CYCLIC:
        return HandedOn(run) if run.config.shard == "stages" else Cyclic(run)
    if run.config.pp == 1:
        return Loop(run)
    if run.config.schedule == "2bw":
        return TwoBW(run)
    if run.config.schedule == "local":
        return Local(run)
    return FlushedPipeline(run)
