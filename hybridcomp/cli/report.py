"""``hybridcomp report``: show what a run sent, from its metrics and traces, and merge the traces of all ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridcomp import trace
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.report import show
from hybridcomp.demo.record import read_run
from hybridcomp.errors import ConfigError

EXAMPLES = """examples:
  hybridcomp report runs/gpt                 # the folder of a `hybridcomp train`
  HYBRIDCOMP_TRACE=runs/mine mpiexec -n 4 python train.py; hybridcomp report runs/mine

It reads RUN/metrics.jsonl, and trace.RANK.json in RUN and in the folders directly in it, of which it writes one
trace.json beside them: https://ui.perfetto.dev opens it.
"""
METRICS = "metrics.jsonl"


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp report``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp report",
        description="Say what a run sent and what was compressed, and merge the traces of its ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("run", type=Path, metavar="RUN", help="a folder with metrics or traces")
    return result


def main(argv: list[str]) -> int:
    """Run ``hybridcomp report ARGV`` and return the exit code.

    Raises:
        ConfigError: the folder has neither metrics nor traces, or they cannot be read.
    """
    run = parser().parse_args(argv).run
    folders = [folder for folder in (run, *sorted(run.glob("*/"))) if trace.files(folder)]
    metrics = run / METRICS
    if not folders and not metrics.exists():
        raise ConfigError(
            f"{run} has neither {METRICS} nor trace.RANK.json: a run of `hybridcomp train` writes the one, "
            f"{trace.VARIABLE}={run} has a program write the other"
        )
    if metrics.exists():
        _tell_metrics(metrics)
    for folder in folders:
        _tell_trace(trace.merge(folder))
    return 0


def _tell_metrics(path: Path) -> None:
    summary = read_run(path.parent.name, path).summary
    loss = summary["val_loss"]
    print(
        f"{path.parent}: policy {summary['policy']}, {summary['steps']} steps in {summary['seconds']:.1f} s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s"
        + (f", validation loss {loss:.4f}" if loss is not None else "")
    )
    show([StatRow(**row) for row in summary["comm"]], sys.stdout, "what rank 0 sent")


def _tell_trace(path: Path) -> None:
    whole = json.loads(path.read_text(encoding="utf-8"))
    about = whole["otherData"]
    ranks = len(about["ranks"])
    show(
        _rows(whole["traceEvents"]),
        sys.stdout,
        f"what {ranks} rank{'s' * (ranks != 1)} sent, by their traces",
    )
    if about["spans_lost"]:
        print(f"{about['spans_lost']} spans are not in the traces, which were full")
    print(f"{path}: open it in https://ui.perfetto.dev or chrome://tracing")


def _rows(events: list[dict[str, Any]]) -> list[StatRow]:
    """Return the totals of a trace's operations, of all ranks."""
    found: dict[tuple[str, str, str, str], StatRow] = {}
    for one in _operations(events):
        found.setdefault(one.key, StatRow(*one.key)).add(one)
    return list(found.values())


def _operations(events: list[dict[str, Any]]) -> Iterator[StatRow]:
    """Yield each operation; its parts follow it in the file."""
    row: StatRow | None = None
    for event in events:
        category, seconds = event.get("cat"), event.get("dur", 0.0) / 1e6
        if category == "operation":
            if row is not None:
                yield row
            args = event["args"]
            row = StatRow(args["axis"], event["name"], args["codec"], args["why"], calls=1)
            row.raw_bytes, row.plain_bytes = args["bytes"], args["uncompressed_bytes"]
            row.wire_bytes, row.wire_seconds = args["wire_bytes"], seconds
        elif row is not None and category in ("encode", "decode"):
            row.wire_seconds -= seconds
            if category == "encode":
                row.encode_seconds += seconds
            else:
                row.decode_seconds += seconds
    if row is not None:
        yield row
