"""Views of what ranks say: rates, who waits for whom, who is slowest."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybridcomp.steps import StepTotals
from hybridcomp.top.read import Job, Rank
from hybridcomp.top.snapshot import Snapshot
from hybridcomp.top.view import History, JobView, look
from tests.top import flying, group, snapshot, totals

T = 1000.0  # a time


def said(rank: int, at: float, **more: object) -> Snapshot:
    return snapshot(rank, at=at, pid=os.getpid() + rank, since=T - 60, **more)


def job(*says: Snapshot, ended: tuple[int, ...] = ()) -> Job:
    return Job("job", tuple(Rank(Path("x"), one, True, one.rank in ended) for one in says))


def seen(*rounds: Job) -> JobView:
    history = History()
    for one in rounds:
        history.add(one)
    return look(rounds[-1], history)


def test_totals_are_sums_and_rates_are_of_the_latest_change() -> None:
    later = totals(calls=14, plain_bytes=8000, wire_bytes=2000, encode_seconds=0.7, wire_seconds=4.6)
    other = said(1, T + 2, axes=(totals(), totals("pp", wire_bytes=10, plain_bytes=10)))
    first = job(said(0, T), said(1, T))
    view = seen(first, job(said(0, T + 2, axes=(later,)), other))
    dp, pp = view.axes
    assert (dp.axis, dp.ranks, dp.totals.calls, dp.totals.plain_bytes) == ("dp", 2, 24, 12000)
    assert dp.totals.wire_bytes == 3000
    assert dp.rates is not None
    assert (dp.rates.plain, dp.rates.sent) == (2000, 500)
    assert dp.rates.encode == pytest.approx(0.1 / 2)
    assert dp.rates.wire == pytest.approx(0.3 / 2)
    assert pp.rates is not None
    assert pp.rates.sent == 5  # an axis that is new
    mine = view.ranks[0].rates
    assert mine is not None
    assert (mine.sent, mine.encode, mine.wire) == (500, pytest.approx(0.1), pytest.approx(0.3))


def test_steps_are_the_latest_ones_where_one_has_ended_since() -> None:
    first, later = StepTotals(5, 4, 0, 4.0, 1.0), StepTotals(7, 6, 0, 8.0, 4.0)
    view = seen(
        job(said(0, T, steps=first), said(1, T, steps=first)),
        job(said(0, T + 2, steps=later), said(1, T + 2, steps=first)),
    )
    assert view.axes[0].steps == 12
    assert [rank.steps.count for rank in view.ranks] == [7, 5]
    assert [rank.lately.count for rank in view.ranks] == [2, 5]
    assert [rank.lately.length for rank in view.ranks] == [2.0, 1.0]
    assert [rank.lately.share for rank in view.ranks] == [0.75, 0.25]


def test_there_are_no_rates_before_a_rank_has_spoken_twice() -> None:
    same = job(said(0, T))
    view = seen(same, same)
    assert view.axes[0].rates is None
    assert view.ranks[0].rates is None
    assert view.ranks[0].silent > 1e6  # seconds since 1970
    assert view.slowest is None


def test_an_operation_in_flight_is_time_on_the_wire() -> None:
    started = said(0, T + 2, in_flight=(flying(T + 0.5),))
    (axis,) = seen(job(said(0, T)), job(started)).axes
    assert axis.rates is not None
    assert axis.rates.wire == pytest.approx(1.5 / 2)
    ended = said(0, T + 4, axes=(totals(wire_seconds=4.0 + 3.0),), in_flight=(flying(T + 3.5),))
    (axis,) = seen(job(started), job(ended)).axes
    assert axis.rates is not None
    assert axis.rates.wire == pytest.approx((1.5 + 0.5) / 2)


def test_a_rank_that_has_not_started_what_others_wait_in_is_missing() -> None:
    waits = said(0, T + 5, in_flight=(flying(T),), groups=(group(11, size=3),))
    behind = said(1, T + 4, groups=(group(10, size=3),))
    view = seen(job(waits, behind))
    (one,) = view.operations
    assert (one.op, one.axis, one.number, one.seconds) == ("all_reduce", "dp", 11, 5.0)
    assert (one.ranks, one.missing, one.awaits, one.elsewhere) == ((0,), (1,), (), 1)
    assert view.slowest is not None
    assert (view.slowest.rank, view.slowest.seconds, view.slowest.share) == (1, 5.0, None)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (said(1, T - 1, groups=(group(10),)), "it spoke before the operation began"),
        (said(1, T + 4, groups=(group(11),), in_flight=(flying(T),)), "it has started it"),
        (said(1, T + 4, groups=(group(12),)), "it has ended it"),
        (said(1, T + 4, groups=(group(10, key="b"),)), "it is of another communicator"),
    ],
)
def test_who_is_not_missing(other: Snapshot, why: str) -> None:
    waits = said(0, T + 5, in_flight=(flying(T, awaits=(1,)),), groups=(group(11),))
    view = seen(job(waits, other))
    assert view.operations[0].missing == (), why
    assert view.operations[0].awaits == (1,)
    assert view.slowest is None


def test_sends_and_receives_are_by_rank() -> None:
    receive = flying(T, 0, (1,), op="recv")
    view = seen(job(said(0, T + 1, in_flight=(receive,)), said(1, T + 2, in_flight=(receive,))))
    assert [(one.ranks, one.awaits, one.seconds) for one in view.operations] == [
        ((1,), (1,), 2.0),
        ((0,), (1,), 1.0),
    ]


def waited(rank: int, at: float, seconds: float, **more: object) -> Snapshot:
    return said(rank, at, groups=(group(waited=seconds, **more),))


def test_who_waits_least_keeps_the_others_waiting() -> None:
    first = job(*(waited(rank, T, 0.0) for rank in range(4)))
    second = [waited(0, T + 2, 1.0), waited(1, T + 2, 1.4), waited(2, T + 2, 0.2), waited(3, T + 2, 1.2)]
    view = seen(first, job(*second))
    assert view.slowest is not None
    assert (view.slowest.rank, view.slowest.axis, view.slowest.seconds) == (2, "dp", None)
    assert view.slowest.share == pytest.approx(0.6 - 0.1)
    level = [waited(rank, T + 2, 1.0 + rank / 100) for rank in range(4)]
    assert seen(first, job(*level)).slowest is None
    # The least waits differ by less than the others do among each other.
    uneven = [waited(rank, T + 2, seconds) for rank, seconds in enumerate((0.2, 0.3, 0.9, 1.4))]
    assert seen(first, job(*uneven)).slowest is None
    apart = [waited(0, T + 2, 1.0, key="a"), waited(1, T + 2, 0.0, key="b")]
    assert seen(first, job(*apart)).slowest is None


def test_a_rank_that_died_is_named() -> None:
    first = job(said(0, T), said(1, T))
    waits = said(0, T + 5, in_flight=(flying(T + 2),), groups=(group(11),))
    view = seen(first, job(waits, said(1, T, in_flight=(flying(T - 5, 3),)), ended=(1,)))
    assert [rank.ended for rank in view.ranks] == [False, True]
    assert view.ranks[1].rates is None
    assert [(one.number, one.missing) for one in view.operations] == [(11, (1,))]
    assert view.slowest is not None
    assert view.slowest.rank == 1


def test_a_rank_that_counts_anew_has_no_negative_rates() -> None:
    fewer = replace(said(0, T + 1), axes=(totals(wire_bytes=0, plain_bytes=0),))
    view = seen(job(said(0, T)), job(fewer))
    assert view.axes[0].rates is not None
    assert view.axes[0].rates.sent == 0
