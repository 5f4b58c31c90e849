"""Check that every kind of step is in all files that list them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridcomp.schedules import draw
from hybridcomp.schedules.faults import describe
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Kind, Operation, Schedule, Span, Step
from hybridcomp.schedules.simulate import Link, Machine, simulate
from hybridcomp.schedules.topology import Topology

ROOT = Path(__file__).parents[2]
SPAN, OUT = Span(Buffer.SEND, 0, 8), Span(Buffer.RECV, 0, 8)
TOLD = {
    Kind.ENCODE: (Step(Kind.ENCODE, slot=3, span=SPAN), "encode SEND[0:8] into slot 3"),
    Kind.SEND: (Step(Kind.SEND, slot=3, peer=1), "send slot 3 to rank 1"),
    Kind.RECV: (Step(Kind.RECV, slot=3, peer=1), "receive slot 3 from rank 1"),
    Kind.CHECK: (Step(Kind.CHECK, slot=3), "check slot 3"),
    Kind.DECODE: (Step(Kind.DECODE, slot=3, out=OUT), "decode slot 3 to RECV[0:8]"),
    Kind.SUM: (Step(Kind.SUM, slots=(1, 2), span=SPAN, out=OUT), "sum SEND[0:8] and slots 1, 2 to RECV[0:8]"),
    Kind.SUM_ENCODE: (
        Step(Kind.SUM_ENCODE, slot=3, slots=(1,), span=SPAN, out=OUT, divide=True),
        "average SEND[0:8] and slot 1, encode into slot 3 and RECV[0:8]",
    ),
    Kind.COPY: (Step(Kind.COPY, span=SPAN, out=OUT), "copy SEND[0:8] to RECV[0:8]"),
    Kind.SIZES: (
        Step(Kind.SIZES, slot=3, slots=(1, 2), count=2),
        "write the sizes of slots 1, 2 into slot 3",
    ),
    Kind.CUT: (Step(Kind.CUT, slots=(1, 2), count=5), "cut 5 regions by slots 1, 2"),
}


@pytest.mark.parametrize("kind", Kind)
def test_a_step_is_described(kind: Kind) -> None:
    step, words = TOLD[kind]
    assert describe(step) == words


def test_the_engine_has_the_same_kinds_by_the_same_numbers() -> None:
    header = (ROOT / "kernels" / "engine" / "program.hpp").read_text()
    found = re.search(r"enum Kind[^{]*\{([^}]*)\}", header)
    assert found
    names = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() for name in re.findall(r"\bk(\w+)", found[1])]
    assert names == [*(kind.name for kind in sorted(Kind)), "KINDS"]


def test_the_recorder_records_all_kinds() -> None:
    assert all(hasattr(Recorder, kind.name.lower()) for kind in Kind)


@pytest.mark.parametrize("page", ["docs/algorithms.md", "hybridcomp/schedules/schedule.py"])
def test_the_tables_name_all_kinds(page: str) -> None:
    rows = re.findall(r"^(?:\| (`.*?`) \||([A-Z_]{3,})  )", (ROOT / page).read_text(), re.MULTILINE)
    named = {word.upper() for row in rows for word in re.findall(r"\w+", "".join(row))}
    assert {kind.name for kind in Kind} <= named


def test_a_kind_without_a_colour_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    schedules = [two_ranks(rank) for rank in range(2)]
    timeline = simulate(schedules, Machine(Link(1e-5, 1e9)), lambda slot, n: 4 * n)
    monkeypatch.setattr(draw, "_COMPUTES", {})
    monkeypatch.setattr(draw, "_SENDS", {})
    path = tmp_path / "drawn.svg"
    with path.open("wb") as file:
        draw.picture(schedules, timeline, "title", file, path.suffix[1:])
    assert path.stat().st_size


def two_ranks(rank: int) -> Schedule:
    """Return the schedule of one message from rank 0 to rank 1."""
    r = Recorder(Operation("send", (8,), 4), Topology.even(2, 1), rank)
    slot = r.slot(8)
    if rank:
        r.recv(slot, 8, 0)
        r.decode(slot, OUT)
    else:
        r.encode(slot, SPAN)
        r.send(slot, 1)
    return r.finish()
