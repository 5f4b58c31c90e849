"""Predict a training step on a cluster: its seconds, traffic and memory, before it is run. See docs/plan.md."""

from __future__ import annotations

from hybridcomp.planner.cluster import Cluster
from hybridcomp.planner.compute import ComputeProfile, Datasheet
from hybridcomp.planner.step.memory import Memory
from hybridcomp.planner.step.prediction import StepPrediction, predict_step
from hybridcomp.planner.step.replay import Span

__all__ = [
    "Cluster",
    "ComputeProfile",
    "Datasheet",
    "Memory",
    "Span",
    "StepPrediction",
    "predict_step",
]
