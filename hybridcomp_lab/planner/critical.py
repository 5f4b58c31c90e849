"""Find the critical path of a predicted step, and write its spans as a Chrome trace."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridcomp import trace
from hybridcomp_lab.planner.step.replay import Span

_SAME = 1e-9  # seconds between two events that count as one


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """Return the chain of spans that the end of the last one waited for, in order of time.

    In a simulation, a span begins when another one ends that it waits for. Where several ended at that time, one of
    the same rank is taken, if there is any.

    Args:
        spans: spans of all ranks.
    """
    by_end = sorted((span for span in spans if span.end > span.begin + _SAME), key=lambda span: span.end)
    ends = [span.end for span in by_end]
    if not by_end:
        return []
    at = max(by_end, key=lambda span: (span.end, span.stream == "compute", -span.rank))
    path = [at]
    while True:
        upper = bisect.bisect_right(ends, at.begin + _SAME)
        if upper == 0:
            break
        lower = bisect.bisect_left(ends, ends[upper - 1] - 2 * _SAME)
        # Consider the spans that ended last before it: at its start or, with a latency, somewhat earlier.
        rank = at.rank
        before = max(
            by_end[lower:upper], key=lambda span: (span.rank == rank, span.stream == "compute", span.begin)
        )
        at = before
        path.append(at)
    return path[::-1]


def shares(path: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of a path by stream; ``waiting`` is the time between its spans."""
    found: dict[str, float] = {}
    for span in path:
        found[span.stream] = found.get(span.stream, 0.0) + span.end - span.begin
    if path:
        gaps = sum(max(0.0, b.begin - a.end) for a, b in itertools.pairwise(path))
        if gaps > _SAME:
            found["waiting"] = gaps
    return found


def write_trace(spans: Sequence[Span], path: Path, about: dict[str, Any]) -> None:
    """Write spans as a Chrome trace: a process for each rank, a track for each stream.

    Args:
        spans: spans of all ranks; those of the critical path are marked in their arguments.
        path: path of the file, which https://ui.perfetto.dev opens.
        about: facts that the trace holds about itself.

    Raises:
        ConfigError: the file cannot be written.
    """
    trace.write_events(path, _events(spans), about)


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    critical = set(critical_path(spans))
    streams = sorted({span.stream for span in spans}, key=lambda stream: (stream != "compute", stream))
    for rank in sorted({span.rank for span in spans}):
        yield from trace.named("process_name", rank, 0, name=f"rank {rank} (predicted)")
        yield from trace.named("process_sort_index", rank, 0, sort_index=rank)
        for tid, stream in enumerate(streams):
            yield from trace.named("thread_name", rank, tid, name=stream)
            yield from trace.named("thread_sort_index", rank, tid, sort_index=tid)
    for span in spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.stream,
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "pid": span.rank,
            "tid": streams.index(span.stream),
            "args": {"critical": span in critical},
        }
