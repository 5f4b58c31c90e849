"""Statistics: rows add up and are told apart; the table that people see, and the hint where nothing was compressed."""

from __future__ import annotations

import io
import re
import time

import pytest

from hybridcomp.collectives.report import ASK, hint, show, size, summary
from hybridcomp.collectives.stats import Call, CallPart, StatRow, Stats, StatTable, merge, share_out, since
from hybridcomp.steps import NO_STEPS, StepClock, Steps, StepTotals, between

MB = 1_000_000
HEADINGS = "axis operation codec calls uncompressed on the wire ratio encode s under way s decode s why"


def words(text: str) -> list[str]:
    return text.split()


def row(
    axis="dp", op="all_reduce", codec="int8", reason="policy p", calls=1, plain=MB, wire=250_000
) -> StatRow:
    return StatRow(axis, op, codec, reason, calls, plain, plain, wire, 0, 0.25, 1.5, 12.0)


def plain(reason: str, nbytes: int = MB, **kwargs) -> StatRow:
    return row(codec="none", reason=reason, plain=nbytes, wire=nbytes, **kwargs)


def test_what_leaves_hosts_is_shown_where_hosts_have_several_ranks():
    apart, alone, inside = row(wire=1000), row(op="send", wire=1000), row(axis="tp", wire=2500)
    apart.between_bytes, alone.between_bytes = 300, 1000
    for one in (alone, inside):
        assert summary([one]).splitlines()[1].split() == HEADINGS.split()
    tiers = HEADINGS.replace("wire ratio", "wire inside hosts between hosts ratio").split()
    assert summary([alone, inside]).splitlines()[1].split() == tiers
    lines = summary([apart, alone, inside]).splitlines()
    assert lines[1].split() == tiers
    assert [" ".join(line.split()[6:12]) for line in lines[3:6]] == [
        "1 kB 700 B 300 B",
        "1 kB 0 B 1 kB",
        "2.5 kB 2.5 kB 0 B",
    ]
    totals = merge([[apart], [apart], [inside]])
    assert [(r.between_bytes, r.inside_bytes) for r in totals] == [(600, 1400), (0, 2500)]
    assert since([apart], totals)[0].between_bytes == 300


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_call_counts_its_seconds_apart():
    call = Call("dp", "all_reduce", "int8", "why", 10, 20)
    began = time.perf_counter()
    with call.encoding():
        time.sleep(0.02)
    passed = time.perf_counter() - began  # on a busy machine long after the sleep's end
    call.decoding().add(1.0, 1.5)
    table = StatTable()
    table.add(call)
    (got,) = table.rows()
    assert 0.02 <= got.encode_seconds <= passed
    assert got.decode_seconds == 0.5
    assert got.wire_seconds >= 0


def test_rows_of_one_kind_are_merged_and_told_apart_again():
    before = merge([[row(), row(op="send")], [row()]])
    assert [r.calls for r in before] == [2, 1]
    now = merge([before, [row(calls=3), row(axis="tp")]])
    new = since(before, now)
    assert [(r.axis, r.op, r.calls, r.plain_bytes) for r in new] == [
        ("dp", "all_reduce", 3, MB),
        ("tp", "all_reduce", 1, MB),
    ]
    assert new[0].encode_seconds == pytest.approx(0.25)
    assert since(now, now) == []
    assert [r.calls for r in before] == [2, 1]


def test_the_table_has_what_matters_first_and_totals_last():
    rows = [
        plain("below min_bytes (16384)", 1000),
        row(plain=40 * MB, wire=10 * MB),
        plain("never compressed", 0),
    ]
    lines = summary(rows).splitlines()
    assert lines[0] == "hybridcomp: what this rank sent"
    assert lines[1].split() == words(HEADINGS)
    body = [line.split() for line in lines[3:] if line.strip()]
    first = "dp all_reduce int8 1 40 MB 10 MB 4 0.250 1.500 12.0 policy p"
    second = "dp all_reduce uncompressed 1 1 kB 1 kB 1 0.250 1.500 12.0 below min_bytes (16384)"
    total = "total 2 40 MB 10 MB 4 0.500 3.000 24.0"
    assert body == [words(first), words(second), words(total)]
    assert not any(line.endswith(" ") for line in lines)
    assert "\x1b" not in "".join(lines)


def test_where_steps_are_known_the_table_is_of_one_step():
    rows = [row(plain=40 * MB, wire=10 * MB, calls=20)]
    lines = summary(rows, steps=Steps(10)).splitlines()
    assert lines[0] == "hybridcomp: what this rank sent in a step, the mean of 10"
    assert lines[1].split() == words(HEADINGS.replace(" s ", " ms "))
    assert lines[3].split() == words("dp all_reduce int8 2 4 MB 1 MB 4 25 150 1,200 policy p")
    assert len(lines) == 6  # nothing is said of waiting, which is not known
    assert summary(rows, steps=Steps()) == summary(rows)


def test_rows_keep_their_totals_and_have_means_of_a_step():
    one = row(plain=40 * MB, wire=10 * MB, calls=20)
    one.between_bytes = 4 * MB
    counted = Stats([one], Steps(10, 1.8, 0.9, 9))
    assert [(r.calls, r.wire_bytes) for r in counted] == [(20, 10 * MB)]
    (mean,) = counted.per_step()
    assert (mean.axis, mean.op, mean.codec, mean.reason) == one.key
    assert (mean.calls, mean.plain_bytes, mean.wire_bytes) == (2, 4 * MB, MB)
    assert (mean.inside_bytes, mean.between_bytes) == (600_000, 400_000)
    assert (mean.encode_seconds, mean.wire_seconds, mean.decode_seconds) == (0.025, 0.15, 1.2)
    assert (counted.steps.length, counted.steps.share) == (0.2, 0.5)
    assert Stats([one], Steps()).per_step() == []


@pytest.mark.parametrize("sizes", [(7,), (1, 1, 1), (3, 0, 1000, 5), (0, 0)])
def test_an_operation_is_shared_out_to_the_last_byte(sizes):
    total = row(calls=1, plain=10_007, wire=2_503)
    total.shared_bytes, total.between_bytes = 1001, 501
    kinds = [CallPart("int8", f"reason {n}", 2, size) for n, size in enumerate(sizes)]
    shares = share_out(total, kinds)
    assert [(one.axis, one.op, one.codec, one.reason, one.calls) for one in shares] == [
        ("dp", "all_reduce", "int8", f"reason {n}", 2) for n in range(len(sizes))
    ]
    for field in ("raw_bytes", "plain_bytes", "wire_bytes", "shared_bytes", "between_bytes"):
        parts = [getattr(one, field) for one in shares]
        assert sum(parts) == getattr(total, field)
        if sum(sizes):
            exact = [getattr(total, field) * size / sum(sizes) for size in sizes]
            assert parts == pytest.approx(exact, abs=1)
    assert sum(one.wire_seconds for one in shares) == pytest.approx(total.wire_seconds)


def test_steps_are_those_since_a_mark():
    marks = [
        NO_STEPS,
        StepTotals(5, 4, 0, 0.8, 0.2),
        StepTotals(9, 8, 0, 1.6, 0.6),
        StepTotals(10, 9, 1, 1.8, 0.6),
    ]
    assert between(marks[1], marks[1]) == Steps(0, 0.0, 0.0, 0)
    assert between(marks[0], marks[1]) == Steps(5, 0.8, 0.2, 4)
    later = between(marks[1], marks[2])
    assert (later.count, later.timed, later.length, later.share) == (
        4,
        4,
        pytest.approx(0.2),
        pytest.approx(0.5),
    )
    assert between(marks[0], marks[3]).waited is None  # of one step it is not known


class Stepping:
    """An optimizer."""


def test_the_optimizer_that_steps_first_makes_the_steps_while_it_lives():
    clock, first, second = StepClock(), Stepping(), Stepping()
    for _ in range(3):
        clock.stepped(first)
        clock.stepped(second)
    assert (clock.totals.count, clock.totals.timed) == (3, 2)
    clock.break_off()
    clock.stepped(first, sees_waits=False)
    assert (clock.totals.count, clock.totals.timed, clock.totals.blind) == (4, 2, 0)
    clock.stepped(first, sees_waits=False)
    assert (clock.totals.count, clock.totals.timed, clock.totals.blind) == (5, 3, 1)
    del first
    clock.stepped(second)
    assert clock.totals.count == 6


@pytest.mark.parametrize(
    ("waited", "share", "asks"), [(0.05, "3%", False), (0.9, "50%", True), (9.0, "100%", True)]
)
def test_the_time_that_a_step_waited_is_told_apart(waited, share, asks):
    line = summary([row()], steps=Steps(10, 1.8, waited, 9)).splitlines()[-1]
    assert line.startswith(f"A step took 200 ms, of which this rank waited {share};")
    assert (ASK in line) == asks


def test_a_row_that_sends_more_than_uncompressed_says_why():
    small = row(codec="none", reason="as sent", calls=10, plain=10_000, wire=15_000)
    large = row(codec="none", reason="as sent", plain=MB, wire=2 * MB)
    lines = summary([small, large, row(plain=2 * MB)]).splitlines()
    assert lines[3].endswith("policy p")
    assert lines[4].endswith("as sent; sends more, by an algorithm of fewer rounds")
    assert lines[5].endswith("as sent; sends more, small messages: each has a head, and goes to all at once")


def test_the_table_is_bounded_and_loses_nothing():
    rows = [row(axis=f"axis{i}", plain=(i + 1) * MB) for i in range(30)]
    lines = summary(rows).splitlines()
    assert len(lines) == 3 + 20 + 2
    assert lines[3].startswith("axis29 ")
    assert lines[22].split() == words("11 kinds more 11 66 MB 2.75 MB 24 2.750 16.5 132.0")
    assert lines[-1].split()[:4] == ["total", "30", "465", "MB"]


@pytest.mark.parametrize(("columns", "widest"), [("80", 140), ("200", 200)])
def test_a_terminal_gets_its_width_and_bold_headings(monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    show([row(reason="a reason [that] is longer than a terminal is wide " * 5)], out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert text != out.getvalue()
    assert max(map(len, text.splitlines())) == widest
    assert text.count("[that]") == 5


def test_nothing_is_said_of_nothing():
    assert summary([]) == ""
    assert summary([plain("never compressed", 0)]) == ""


def test_a_policy_that_compressed_nothing_is_told():
    rows = [
        plain("below min_bytes (16384)", 2 * MB, op="all_gather"),
        plain("policy p has sections dp, tp; this group's axis is default", 3 * MB, axis="default"),
        plain("never compressed"),
    ]
    assert hint(rows).splitlines() == [
        "hybridcomp: the policy compresses, and yet nothing was compressed:",
        "  all_reduce on axis default, 3 MB: policy p has sections dp, tp; this group's axis is default",
        "  all_gather on axis dp, 2 MB: below min_bytes (16384)",
    ]
    assert summary(rows).endswith(hint(rows))
    many = [plain("warm-up (9 steps)", axis=f"a{i}") for i in range(8)]
    assert hint(many).splitlines()[-1] == "  and 3 kinds more"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [plain("below min_bytes (16384)"), row()],  # something was compressed
        [plain("the policy says none"), plain("one rank"), plain("as sent")],
        [plain("broadcasts are exact unless named")],
        [plain("below min_bytes (16384)", 30_000)],  # too little for a word
    ],
)
def test_no_hint_where_all_is_well(rows):
    assert hint(rows) is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999_999, "1 MB"), (1234567, "1.235 MB"), (5e15, "5000 TB")],
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text
