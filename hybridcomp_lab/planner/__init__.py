"""Predict a training step on a cluster: its seconds, traffic and memory, before it is run. See docs/plan.md."""

from __future__ import annotations

from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.compute import ComputeProfile, Datasheet
from hybridcomp_lab.planner.step.memory import Memory
from hybridcomp_lab.planner.step.prediction import StepPrediction, predict_step
from hybridcomp_lab.planner.step.replay import Span

__all__ = [
    "Cluster",
    "ComputeProfile",
    "Datasheet",
    "Memory",
    "Span",
    "StepPrediction",
    "predict_step",
]
