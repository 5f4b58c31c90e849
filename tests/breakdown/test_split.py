"""Steps whose times are known are split as they should be."""

from __future__ import annotations

import pytest

from hybridcomp.breakdown.split import aligned, split
from tests.breakdown.making import Rank, two_ranks

KNOWN = {  # by rank: compute, and exposed: encode, wire, decode, waiting
    0: (3.0, {"encode": 1.0, "wire": 2.0, "decode": 1.0, "waiting": 3.0}),
    1: (8.0, {"encode": 0.0, "wire": 2.0, "decode": 0.0, "waiting": 0.0}),
}


def broken_down(folder, **how):
    return split(folder, *aligned(folder), **how)


def check_sums(rows) -> None:
    for row in rows:
        assert row.compute + row.communication == pytest.approx(row.seconds, abs=1e-6)
        assert sum(one.ended - one.began for one in row.slices) == pytest.approx(row.communication, abs=1e-6)


def test_who_is_late_is_waited_for(tmp_path):
    two_ranks(tmp_path)
    result = broken_down(tmp_path)
    assert (result.skipped, result.steps, result.axes) == (0, [0], ["dp"])
    for row in result.rows:
        compute, exposed = KNOWN[row.rank]
        assert row.compute == pytest.approx(compute)
        assert row.exposed == {"dp": pytest.approx(exposed)}
    check_sums(result.rows)
    # Rank 1 encoded for 2 s, and its message was under way for 1 s, before it had to wait.
    hidden = {"encode": 2.0, "wire": 1.0, "decode": 0.0, "waiting": 0.0}
    assert result.of_rank(1)[0].hidden == {"dp": pytest.approx(hidden)}


@pytest.mark.parametrize("behind", [5.0, -3.0])
def test_clocks_of_hosts_are_aligned_by_what_they_exchange(tmp_path, behind):
    two_ranks(tmp_path, behind=behind, clock="another")
    ranks, offsets, error = aligned(tmp_path)
    assert offsets == pytest.approx({0: 0.0, 1: behind}, abs=2e-3)
    assert error <= 2.1e-3
    result = split(tmp_path, ranks, offsets, error)
    for row in result.rows:
        compute, exposed = KNOWN[row.rank]
        assert row.compute == pytest.approx(compute)
        assert row.exposed["dp"] == pytest.approx(exposed, abs=3e-3)
    check_sums(result.rows)


def test_steps_before_the_first_are_left_out_while_one_remains(tmp_path):
    for rank in range(2):
        one = Rank(rank)
        for step in range(4):
            one.step(step, step + 1)
        one.operation(1, 3.5, 3.75)
        one.wait(1, 3.5, 3.75)
        one.write(tmp_path)
    assert broken_down(tmp_path, warmup=1).steps == [1, 2, 3]
    assert broken_down(tmp_path, warmup=9).steps == [3]


def test_messages_wait_for_their_other_end(tmp_path):
    """Rank 0 encodes from 1 to 2 before it sends; rank 1 waits from 0. Two messages of one tag match in order."""
    zero, one = Rank(0), Rank(1)
    for n, at in ((1, 0.0), (2, 10.0)):
        zero.operation(n, at + 1, at + 3, op="send", axis="pp", peer=1, tag=7)
        zero.span("encode", "encode", at + 1, at + 2)
        one.operation(n, at, at + 3, op="recv", axis="pp", peer=0, tag=7)
        one.wait(n, at, at + 3, op="recv", axis="pp")
        for rank in (zero, one):
            rank.step(at, at + 10)
    zero.write(tmp_path)
    one.write(tmp_path)
    result = broken_down(tmp_path, warmup=0)
    for row in result.of_rank(1):
        assert row.exposed["pp"] == pytest.approx({"encode": 0, "wire": 1, "decode": 0, "waiting": 2})
    for row in result.of_rank(0):
        assert row.compute == pytest.approx(10)
        assert row.hidden["pp"] == pytest.approx({"encode": 1, "wire": 1, "decode": 0, "waiting": 0})


@pytest.mark.parametrize(
    ("op", "waiting"), [("broadcast", (0, 2)), ("reduce", (0, 0)), ("all_gather", (0, 2))]
)
def test_who_needs_whom(tmp_path, op, waiting):
    """Rank 0, the root, comes at 3, and rank 1 at 1; both are done at 5."""
    for rank, began in ((0, 3), (1, 1)):
        one = Rank(rank)
        one.step(0, 5)
        one.operation(1, began, 5, op=op, root=0)
        one.wait(1, began, 5, op=op)
        one.write(tmp_path)
    rows = broken_down(tmp_path).rows
    assert [row.exposed["dp"]["waiting"] for row in rows] == pytest.approx(waiting)


def test_what_no_record_explains_is_wire_all_the_same(tmp_path):
    for rank in range(2):
        one = Rank(rank)
        one.step(0, 5)
        one.operation(1, 0, 1)
        one.wait(9, 2, 3)  # its operation is not in the trace, which may have been full
        one.span("wait", "wait", 3.5, 4)
        one.wait(1, 2.5, 3.6)  # a wait of another thread, at the same time
        one.write(tmp_path)
    (row, _) = broken_down(tmp_path).rows
    assert row.compute == pytest.approx(3)
    assert row.of_kind("wire") == pytest.approx(2)
    check_sums([row])
