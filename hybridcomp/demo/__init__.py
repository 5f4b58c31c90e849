"""Demonstration: one model trained over slow links, without, with naive and with hybrid compression."""

from __future__ import annotations

from hybridcomp.demo.plan import FULL, DemoPlan, Run
from hybridcomp.demo.record import RunRecord, read_run
from hybridcomp.demo.report import Report
from hybridcomp.demo.runner import run_all
from hybridcomp.demo.training import RunFailedError

__all__ = ["FULL", "DemoPlan", "Report", "Run", "RunFailedError", "RunRecord", "read_run", "run_all"]
