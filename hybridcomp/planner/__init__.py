"""Predict a training step on a cluster: its seconds, traffic and memory, before it is run. See docs/planner.md."""

from __future__ import annotations

from hybridcomp.planner.cluster import Cluster
from hybridcomp.planner.compute import ComputeProfile, Datasheet
from hybridcomp.planner.memory import Memory
from hybridcomp.planner.prediction import StepPrediction, predict_step
from hybridcomp.planner.replay import Span

__all__ = [
    "Cluster",
    "ComputeProfile",
    "Datasheet",
    "Memory",
    "Span",
    "StepPrediction",
    "predict_step",
]
