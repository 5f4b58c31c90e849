"""Make traces whose times are known: each rank's file, as a recorder writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START = 10**18
GROUP = {"comm": "c0", "ranks": [0, 1]}


class Rank:
    """The trace of one rank; all times are seconds by its own clock."""

    def __init__(self, rank: int, *, groups: list[dict[str, Any]] | None = None, clock: str = "one") -> None:
        self.events: list[dict[str, Any]] = []
        about = {"rank": rank, "host": f"host{rank}", "started_ns": START, "spans_lost": 0, "clock": clock}
        self.about: dict[str, Any] = about | {"groups": [GROUP] if groups is None else groups}

    def span(self, name: str, category: str, began: float, ended: float, **args: Any) -> None:
        times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
        where = {"pid": self.about["rank"], "tid": 0}
        self.events.append({"ph": "X", "name": name, "cat": category, **times, **where, "args": args})

    def operation(
        self, n: int, began: float, ended: float, *, op: str = "all_reduce", axis: str = "dp", **args: Any
    ) -> None:
        counts = {"bytes": 4, "uncompressed_bytes": 4, "wire_bytes": 2, "codec": "int8", "why": "a test"}
        self.span(op, "operation", began, ended, axis=axis, comm="c0", n=n, **counts, **args)

    def wait(self, n: int, began: float, ended: float, *, op: str = "all_reduce", axis: str = "dp") -> None:
        self.span(f"wait for {op}", "wait", began, ended, op=op, axis=axis, comm="c0", n=n)

    def step(self, began: float, ended: float) -> None:
        self.span("step", "step", began, ended, by="the program")

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"trace.{self.about['rank']}.json"
        whole = {"displayTimeUnit": "ms", "otherData": self.about, "traceEvents": self.events}
        path.write_text(json.dumps(whole))
        return path


def two_ranks(folder: Path, *, behind: float = 0.0, clock: str = "one") -> None:
    """Write a step of 10 s: rank 0 computes 2 s, then waits 3 s for rank 1, and so on; see the tests.

    Args:
        folder: folder of the traces.
        behind: seconds that the clock of rank 1 is behind.
        clock: name of rank 1's clock.
    """
    zero, one = Rank(0), Rank(1, clock=clock)
    zero.step(0, 10)
    zero.operation(1, 2, 9)
    zero.span("encode", "encode", 2, 3)
    zero.span("decode", "decode", 8, 9)
    zero.wait(1, 2, 9)
    one.step(-behind, 10 - behind)
    one.operation(1, 4 - behind, 9 - behind)
    one.span("encode", "encode", 4 - behind, 6 - behind)
    one.wait(1, 7 - behind, 9 - behind)
    if clock != zero.about["clock"]:
        zero.operation(2, 9.5, 9.502, axis="default")
        one.operation(2, 9.5 - behind, 9.502 - behind, axis="default")
    one.about["started_ns"] -= 20_000_000_000  # no time of a trace is negative
    for event in one.events:
        event["ts"] += 20e6
    zero.write(folder)
    one.write(folder)
