"""Demonstration: one model trained over slow links, without, with naive and with hybrid compression."""

from __future__ import annotations

from hybridcomp.results.record import RunRecord, read_run
from hybridcomp_lab.demo.plan import FULL, DemoPlan, Run
from hybridcomp_lab.demo.report import Report
from hybridcomp_lab.demo.runner import run_all
from hybridcomp_lab.demo.training import RunFailedError

__all__ = ["FULL", "DemoPlan", "Report", "Run", "RunFailedError", "RunRecord", "read_run", "run_all"]
