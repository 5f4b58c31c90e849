"""Run ``hybridcomp report``: show what a run sent, and where its steps' time went, from its metrics and traces."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridcomp import style, trace, variables
from hybridcomp.breakdown import decided, page, summary
from hybridcomp.breakdown.reading import RankTrace
from hybridcomp.breakdown.split import NO_STEPS, WARMUP, Breakdown, aligned, has_steps, has_waits, split
from hybridcomp.collectives.report import show
from hybridcomp.collectives.stats import CallPart, StatRow, share_out
from hybridcomp.errors import ConfigError
from hybridcomp.files import listed, read_json, write_text
from hybridcomp.results.record import RunRecord, read_run
from hybridcomp.steps import Steps
from hybridcomp.trace import STEPS_BY

EXAMPLES = """examples:
  hybridcomp report runs/gpt                 # the folder of a `hybridcomp train`
  HYBRIDCOMP_TRACE=runs/mine mpiexec -n 4 python train.py; hybridcomp report runs/mine

  hybridcomp report runs/mine --json mine.json --no-picture

It reads RUN/metrics.jsonl, and trace.RANK.json in RUN and in the folders directly in it, of which it writes one
trace.json beside them: https://ui.perfetto.dev opens it. Where the traces have steps, it says how long a step computed,
and what of its communication kept it from that, and draws it in RUN/report.html, with the decisions of rules that have
`adapt`.
"""
PAGE = "report.html"
METRICS = "metrics.jsonl"


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp report``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp report",
        description="Say what a run sent and what was compressed, and where the time of its steps went.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("run", type=Path, metavar="RUN", help="a folder with metrics or traces")
    result.add_argument(
        "--json", type=Path, metavar="PATH", help="write the times of all steps and ranks there"
    )
    result.add_argument("--no-picture", action="store_true", help=f"write no RUN/{PAGE}")
    result.add_argument(
        "--skip",
        type=_count,
        default=WARMUP,
        metavar="N",
        help="first steps to leave out (default: %(default)s)",
    )
    return result


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number of steps, 0 or more, not {text!r}")
    return int(text)


def main(argv: list[str]) -> int:
    """Run ``hybridcomp report ARGV`` and return the exit code.

    Raises:
        ConfigError: the folder has neither metrics nor traces, or they cannot be read.
    """
    arguments = parser().parse_args(argv)
    run = arguments.run
    folders = [folder for folder in (run, *listed(run, "*/")) if trace.files(folder)]
    metrics = run / METRICS
    if not folders and not os.path.lexists(metrics):
        raise ConfigError(
            f"{run} has neither {METRICS} nor trace.RANK.json: a run of `hybridcomp train` writes the one, "
            f"{variables.TRACE}={run} has a program write the other"
        )
    record = read_run(run.name, metrics) if os.path.lexists(metrics) else RunRecord(run.name)
    if os.path.lexists(metrics):
        _tell_metrics(run, record)
    found = [_tell_traces(folder, arguments.skip) for folder in folders]
    breakdowns = [one for one in found if isinstance(one, Breakdown)]
    if not breakdowns:
        why = next((one for one in found if isinstance(one, str)), None)
        _say_none(
            f"{run} has no traces: with {variables.TRACE}={run} the program writes where its steps' time goes"
            if why is None
            else f"{run} {why}",
            asked=arguments.json is not None,
        )
        if record.decisions and not arguments.no_picture:
            _draw(run, [], record)
        return 0
    if arguments.json is not None:
        write_text(arguments.json, json.dumps([summary.as_json(one) for one in breakdowns]) + "\n")
    if not arguments.no_picture:
        _draw(run, breakdowns, record)
    return 0


def _draw(run: Path, breakdowns: list[Breakdown], record: RunRecord) -> None:
    """Write the page, or say which library it lacks: the tables need none for pictures."""
    lacking = page.missing()
    if lacking is not None:
        style.say(lacking)
        return
    made = decided.figure(record.decisions, record.summary["steps"]) if record.decisions else None
    title = "Where the time went" if breakdowns else "What was decided"
    write_text(run / PAGE, page.page(breakdowns, f"{title}: {run.resolve().name}", made))
    style.say(f"{run / PAGE}: the same as {'pictures, with a timeline' if breakdowns else 'a picture'}")


def _tell_traces(folder: Path, skip: int) -> Breakdown | str:
    """Merge and show the traces of a folder; return the breakdown of its steps, or what they lack for it."""
    ranks, offsets, error = aligned(folder)
    _tell_trace(trace.merge(folder, {rank: 1e9 * seconds for rank, seconds in offsets.items()}))
    if not has_steps(ranks):
        return f"has no steps in its traces: {NO_STEPS}"
    if not has_waits(ranks):
        style.say(_steps_said(ranks, skip))
        return (
            "has no operations of the backend hybridcomp in its traces: over gloo or NCCL it is not known for what a "
            "rank waited. The table that the program prints at its end has the share of a step that it waited, and "
            "`hybridcomp compare -- COMMAND` has it for other policies, too"
        )
    breakdown = split(folder, ranks, offsets, error, warmup=skip)
    style.say("")
    summary.show(breakdown, style.console())
    return breakdown


def _steps_said(ranks: list[RankTrace], skip: int) -> str:
    """Return a sentence on the length of the steps, of which the first are left out where others follow."""
    every = [max(one.steps.values(), key=len) for one in ranks if one.steps]
    count = max(map(len, every))
    milliseconds = [
        1e3 * (ended - began) for steps in every for began, ended in sorted(steps)[min(skip, count - 1) :]
    ]
    low, *_, high = (
        statistics.quantiles(milliseconds, n=10, method="inclusive")
        if len(milliseconds) > 1
        else [milliseconds[0]] * 2
    )
    return (
        f"A step took {statistics.median(milliseconds):,.4g} ms, the median of {count - min(skip, count - 1):,} on "
        f"{len(every)} rank{'s' * (len(every) > 1)}; 10 to 90 %: {low:,.4g} to {high:,.4g} ms"
    )


def _say_none(why: str, *, asked: bool) -> None:
    """Say why there is no breakdown, by an error where the caller has asked for its numbers."""
    if asked:
        raise ConfigError(why)
    style.say(why)


def _tell_metrics(run: Path, record: RunRecord) -> None:
    summary = record.summary
    loss = summary["val_loss"]
    style.say(
        f"{run}: policy {summary['policy']}, {summary['steps']} steps in {summary['seconds']:.1f} s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s"
        + (f", validation loss {loss:.4f}" if loss is not None else "")
    )
    steps = Steps(summary["steps"])
    show([StatRow(**row) for row in summary["comm"]], sys.stdout, "what rank 0 sent", steps)
    if record.decisions:
        style.say("")
        decided.show(record.decisions, style.console())


def _tell_trace(path: Path) -> None:
    whole = read_json(path)
    about, events = whole["otherData"], whole["traceEvents"]
    ranks = len(about["ranks"])
    title = "by the trace of 1 rank, what it sent"
    if ranks > 1:
        title = f"by the traces of {ranks} ranks, what an average one sent"
    show(rows(events), sys.stdout, title, Steps(steps(events, ranks)), ranks)
    if about["spans_lost"]:
        style.say(f"{about['spans_lost']} spans are not in the traces, which were full")
    style.say(f"{path}: open it in https://ui.perfetto.dev or chrome://tracing")


def steps(events: list[dict[str, Any]], ranks: int) -> int:
    """Return the mean number of a rank's optimizer steps, by which the table at exit counts, too."""
    found = [event for event in events if event.get("cat") == "step" and event["args"]["by"] == STEPS_BY[-1]]
    return round(len(found) / ranks)


def rows(events: list[dict[str, Any]]) -> list[StatRow]:
    """Return the totals of a trace's operations, over all ranks, by the kinds of the table at exit."""
    found: dict[tuple[str, str, str, str], StatRow] = {}
    for one, kinds in _operations(events):
        for row in share_out(one, kinds) if kinds else [one]:
            found.setdefault(row.key, StatRow(*row.key)).add(row)
    return list(found.values())


def _operations(events: list[dict[str, Any]]) -> Iterator[tuple[StatRow, list[CallPart]]]:
    """Yield the statistics of each operation, and its kinds, if it has others; its parts follow it in the file."""
    row: StatRow | None = None
    kinds: list[CallPart] = []
    for event in events:
        category, seconds = event.get("cat"), event.get("dur", 0.0) / 1e6
        if category == "operation":
            if row is not None:
                yield row, kinds
            args = event["args"]
            row = StatRow(args["axis"], event["name"], args["codec"], args["why"], calls=args.get("calls", 1))
            row.raw_bytes, row.plain_bytes = args["bytes"], args["uncompressed_bytes"]
            row.wire_bytes, row.wire_seconds = args["wire_bytes"], seconds
            row.shared_bytes, row.between_bytes = args.get("shared_bytes", 0), args.get("between_bytes", 0)
            kinds = [CallPart(*(kind[name] for name in CallPart._fields)) for kind in args.get("kinds", ())]
        elif row is not None and category in ("encode", "decode"):
            row.wire_seconds -= seconds
            if category == "encode":
                row.encode_seconds += seconds
            else:
                row.decode_seconds += seconds
    if row is not None:
        yield row, kinds
