"""Chrome traces: their events are well formed and nest, every rank writes its own, and they merge."""

from __future__ import annotations

import json
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridcomp as hc
from hybridcomp import trace
from hybridcomp.errors import ConfigError
from tests.torch.harness import mpiexec

Event = dict[str, Any]
ROUNDING = 0.01  # microseconds: of doubles
RANKS = 3

PROGRAM = """
    import numpy as np
    from mpi4py import MPI
    import hybridcomp as hc

    comm = hc.Communicator(MPI.COMM_WORLD, "int8", "dp")
    x, small = np.ones(300_000, np.float32), np.ones(10, np.int32)
    started = [comm.Iallreduce(x, np.empty_like(x), name="layer") for _ in range(4)]
    for request in started:
        request.wait()
    comm.Allreduce(small, small.copy())
    comm.Allreduce(x.reshape(300, 1000), np.empty((300, 1000), np.float32), codec="powersgd:rank=2")
    comm.Free()
"""


@pytest.fixture
def recorder(tmp_path) -> Iterator[trace.Recorder]:
    yield trace.start(tmp_path / "run")
    trace.stop()


def events_of(path: Path) -> list[Event]:
    """Return the events of a file, each checked by the Trace Event Format."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert whole["displayTimeUnit"] in ("ms", "ns")
    for event in whole["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        elif event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert key in event["args"]
        else:
            assert (event["ph"], event["s"]) == ("i", "p")
    return whole["traceEvents"]


def check_nesting(events: list[Event]) -> None:
    """Check that spans of a track are apart or nested, and that every track and process has a name."""
    tracks = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert set(tracks) == named
    assert {pid for pid, _ in tracks} == {e["pid"] for e in events if e["name"] == "process_name"}
    for spans in tracks.values():
        open_until: list[float] = []
        for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= span["ts"] + ROUNDING:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1] + ROUNDING, span
            open_until.append(end)


def complete(events: list[Event], name: str, pid: int | None = None) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["name"] == name and pid in (None, e["pid"])]


def covered(whole: Event, events: list[Event]) -> list[Event]:
    """Return the spans within one."""
    end = whole["ts"] + whole["dur"] + ROUNDING
    same = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (whole["pid"], whole["tid"])]
    return [e for e in same if e is not whole and e["ts"] >= whole["ts"] and e["ts"] + e["dur"] <= end]


def test_every_rank_writes_its_trace_at_exit(tmp_path) -> None:
    folder = tmp_path / "traces"
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = mpiexec(RANKS, str(program), HYBRIDCOMP_TRACE=str(folder))
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.iterdir()) == [f"trace.{r}.json" for r in range(RANKS)]
    merged = trace.merge(folder)
    assert merged == folder / "trace.json"
    events = events_of(merged)
    check_nesting(events)
    for rank in range(RANKS):
        own = events_of(folder / f"trace.{rank}.json")
        check_nesting(own)
        assert {e["pid"] for e in own} == {rank}
        whole = complete(events, "all_reduce", rank)
        codecs = [e["args"]["codec"] for e in whole]
        assert sorted(codecs) == ["int8:block=128"] * 4 + ["none", "powersgd:rank=2:seed=0"]
        for one in whole:
            parts = covered(one, events)
            kinds = {e["name"] for e in parts}
            assert kinds == ({"wire"} if one["args"]["codec"] == "none" else {"encode", "wire", "decode"})
            assert sum(e["dur"] for e in parts) <= one["dur"] + ROUNDING * len(parts)
        first = next(e["args"] for e in whole if e["args"]["codec"] == "int8:block=128")
        assert first["bytes"] == 1_200_000
        assert first["name"] == "layer"
        assert first["ratio"] == pytest.approx(first["uncompressed_bytes"] / first["wire_bytes"], abs=1e-3)
    # The ranks wait for each other, so the merged clock has the operations of all of them at the same time.
    begun = [complete(events, "all_reduce", rank)[0]["ts"] for rank in range(RANKS)]
    ended = [max(e["ts"] + e["dur"] for e in complete(events, "all_reduce", r)) for r in range(RANKS)]
    assert max(begun) < min(ended)


def test_spans_within_one_another_share_a_track(recorder: trace.Recorder) -> None:
    t = time.perf_counter()
    recorder.span("hook", "encode", t + 1, t + 2)
    recorder.span("hook", "bucket", t, t + 3, bytes=12, name="first")
    recorder.span("hook", "bucket", t + 2.5, t + 4)
    events = events_of(trace.stop())
    check_nesting(events)
    tids = {(e["name"], e["tid"]) for e in events if e["ph"] == "X"}
    assert tids == {("bucket", 0), ("encode", 0), ("bucket", 1)}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "hook", 1: "hook (2)"}
    bucket = next(e for e in complete(events, "bucket") if e["tid"] == 0)
    assert bucket["args"] == {"bytes": 12, "name": "first"}
    assert bucket["dur"] == pytest.approx(3e6, abs=ROUNDING)


def test_operations_that_overlap_have_tracks_of_their_own(recorder: trace.Recorder) -> None:
    t = time.perf_counter()
    recorder.operation("dp", "outer", t, t + 4, [("encode", t, t + 1), ("decode", t + 3, t + 4)], {})
    recorder.operation("dp", "inner", t + 1, t + 2, [], {})
    recorder.operation("dp", "after", t + 4, t + 5, [], {})
    recorder.operation("tp", "other", t, t + 1, [], {})
    events = events_of(trace.stop())
    check_nesting(events)
    tids = {e["name"]: e["tid"] for e in events if e.get("cat") == "operation"}
    assert tids == {"outer": 0, "after": 0, "inner": 1, "other": 2}
    parts = [(e["name"], round(e["dur"] / 1e6)) for e in covered(complete(events, "outer")[0], events)]
    assert parts == [("encode", 1), ("wire", 2), ("decode", 1)]


def test_spans_beyond_the_limit_are_counted_and_noted(tmp_path) -> None:
    recorder = trace.start(tmp_path, limit=5)
    t = time.perf_counter()
    for i in range(4):
        recorder.operation(
            "dp", "all_reduce", t + i, t + i + 0.5, [], {}
        )  # two spans each: itself, and the wire
    recorder.span("dp", "small", t, t)
    path = trace.stop()
    events = events_of(path)
    assert len(complete(events, "all_reduce")) == 2
    (note,) = [e for e in events if e["ph"] == "i"]
    assert "5 spans from here on are not in it" in note["name"]
    assert note["ts"] == pytest.approx((t + 2.5 - recorder._origin) * 1e6, abs=1)
    assert json.loads(path.read_text())["otherData"]["spans_lost"] == 5


def test_what_began_before_the_trace_has_no_negative_time(recorder: trace.Recorder) -> None:
    recorder.span("dp", "early", 0.0, time.perf_counter())
    (event,) = complete(events_of(trace.stop()), "early")
    assert event["ts"] == 0


def test_merging_aligns_the_clocks(tmp_path) -> None:
    for rank, late in ((0, 0), (1, 2_500_000)):
        event = {"ph": "X", "name": "x", "cat": "x", "ts": 10.0, "dur": 1.0, "pid": rank, "tid": 0}
        about = {"rank": rank, "host": "h", "started_ns": 10**18 + late, "spans_lost": 0}
        file = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [event]}
        (tmp_path / f"trace.{rank}.json").write_text(json.dumps(file))
    for _ in range(2):  # what it writes is none of what it reads
        events = events_of(trace.merge(tmp_path))
        assert [e["ts"] for e in events] == [10.0, 2510.0]


def test_nothing_is_recorded_unless_started(tmp_path) -> None:
    assert trace.active() is None
    assert trace.stop() is None
    recorder = trace.start(tmp_path / "deep" / "folder")
    assert trace.active() is recorder
    with pytest.raises(RuntimeError, match="is being recorded"):
        trace.start(tmp_path)
    assert trace.stop() == tmp_path / "deep" / "folder" / "trace.0.json"
    assert trace.active() is None


def test_errors_name_the_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"has no trace\.RANK\.json"):
        hc.trace.merge(tmp_path)
    (tmp_path / "trace.0.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"trace\.0\.json is no trace"):
        hc.trace.merge(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make"):
        hc.trace.start(tmp_path / "file" / "folder")
    with pytest.raises(ValueError, match="at least 1"):
        hc.trace.start(tmp_path, limit=0)
