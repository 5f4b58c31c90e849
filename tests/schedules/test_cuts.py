"""Schedules whose steps depend on a cut: what is recorded, what is carried out, and what is wrong with spoiled ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridcomp.schedules import cuts
from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.schedule import Buffer, Kind, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.verify import verify
from tests.schedules.cases import check, with_step

PROMISE = ALGORITHMS["all_reduce"]["oktopk"].promise
SEND, RECV = Span(Buffer.SEND, 0, 64), Span(Buffer.RECV, 0, 64)


def oktopk(n: int = 200, ranks: int = 3, **how) -> list[Schedule]:
    """Return all ranks' schedules of regions of 64 elements."""
    return check("all_reduce", "oktopk", Topology.even(ranks, 1), n, **how)


def index_of(schedule: Schedule, kind: Kind, region: int = -1) -> int:
    return next(i for i, s in enumerate(schedule.steps) if s.kind is kind and s.region == region)


def said(schedules: list[Schedule]) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(schedules, PROMISE)
    return str(error.value)


def with_cut(rank: int, ranks: int = 3) -> tuple[Recorder, int]:
    """Return a recorder that knows the owner of one region, of which it has a message in the slot."""
    r = Recorder(Operation("all_reduce", (64,), 4), Topology.even(ranks, 1), rank)
    part, sizes = r.slot(64), [r.slot(1, sizes=True) for _ in range(ranks)]
    r.encode(part, SEND)
    r.sizes([part], sizes[rank])
    r.cut(sizes[rank : rank + 1])
    return r, part


def test_who_excludes_one_another_does_not_wait() -> None:
    r, part = with_cut(0)
    result = r.slot(64)
    cut = len(r.finish().steps) - 1
    for owner in (1, 2):
        with r.owned(0, owner):
            r.recv(result, 64, owner)
    with r.owned(0, 0):
        r.sum_encode([part], None, result, None)
        r.send(result, 1)
    with r.owned(0, 2):
        r.decode(result, RECV)
    with r.owned(0, 1):
        r.decode(result, RECV)
    r.send(result, 2)
    r.copy(RECV, Span(Buffer.SEND, 0, 64))
    after = [step.after for step in r.finish().steps[cut + 1 :]]
    first, second, own = cut + 1, cut + 2, cut + 3
    assert after[:4] == [(cut,), (cut,), (cut,), (own,)]
    assert after[4:6] == [(second,), (first,)]
    assert after[6:] == [(first, second, own), (cut + 5, cut + 6)]


def test_what_is_not_carried_out_passes_on_what_it_waits_for() -> None:
    r, part = with_cut(0)
    with r.owned(0, 1):
        r.copy(SEND, RECV)
    with r.owned(0, 2):
        r.send(part, 2)
    r.copy(RECV, SEND)
    cut = len(r.finish().steps) - 4
    (mine,) = cuts.resolved([r.finish()], [1])
    assert [step.kind for step in mine.steps[cut + 1 :]] == [Kind.COPY, Kind.COPY]
    (neither,) = cuts.resolved([r.finish()], [0])
    assert [step.after for step in neither.steps[cut + 1 :]] == [(cut,)]


def test_every_step_is_carried_out_in_some_case() -> None:
    schedules = oktopk()
    for rank, schedule in enumerate(schedules):
        left = {(s.kind, s.slot, s.peer, s.region, s.owner) for s in schedule.steps}
        for case in cuts.cases(schedules):
            left -= {(s.kind, s.slot, s.peer, s.region, s.owner) for s in case[rank].steps}
        assert not left


def test_a_schedule_without_a_cut_is_as_it_is() -> None:
    schedules = check("all_reduce", "direct", Topology.even(3, 1), 200)
    assert list(cuts.cases(schedules)) == [schedules]
    assert cuts.even(schedules) == schedules


def test_the_engine_takes_conditions_and_sizes() -> None:
    schedule = oktopk(100)[1]
    steps, slots, _ = schedule.packed()
    assert [(s.region, s.owner) for s in schedule.steps] == list(
        zip(steps[15::17], steps[16::17], strict=True)
    )
    assert list(slots[2::3]) == [2 * slot.sizes for slot in schedule.slots]


# -- spoiled schedules ----------------------------------------------------------------------------------


def test_a_step_must_know_whether_it_is_carried_out() -> None:
    schedules = oktopk()
    index = index_of(schedules[1], Kind.RECV, region=2)
    spoiled = with_step(schedules[1], index, after=())
    text = said([schedules[0], spoiled, schedules[2]])
    assert "nothing keeps it apart from the other user of the owners of regions: rank 1" in text


def test_all_ranks_cut_by_the_same_sizes() -> None:
    schedules = oktopk()
    index = index_of(schedules[1], Kind.CUT)
    slots = schedules[1].steps[index].slots
    for wrong in (slots[::-1], (slots[0], slots[0], slots[2]), slots[:2]):
        spoiled = with_step(schedules[1], index, slots=wrong)
        text = said([schedules[0], spoiled, schedules[2]])
        assert "does not cut by the sizes of all ranks' messages of these regions" in text


def test_sizes_are_of_the_regions_in_their_order() -> None:
    schedules = oktopk()
    index = index_of(schedules[0], Kind.SIZES)
    slots = schedules[0].steps[index].slots
    text = said([with_step(schedules[0], index, slots=(slots[1], slots[0], *slots[2:])), *schedules[1:]])
    assert "has not this rank's own elements from 0 on" in text
    assert "the messages have 3 regions" in said(
        [with_step(schedules[0], index, slots=slots[:3]), *schedules[1:]]
    )


def test_sizes_are_no_elements() -> None:
    schedules = oktopk()
    sizes = schedules[0].steps[index_of(schedules[0], Kind.SIZES)].slot
    index = index_of(schedules[0], Kind.DECODE)
    text = said([with_step(schedules[0], index, slot=sizes), *schedules[1:]])
    assert "holds sizes, and no elements" in text
    index = index_of(schedules[0], Kind.ENCODE)
    assert "the slot is for sizes" in said([with_step(schedules[0], index, slot=sizes), *schedules[1:]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": 4}, "there is no region 4"),
        ({"owner": 3}, "or no owner 3"),
        ({"owner": -1}, "or no owner -1"),
        ({"region": -1, "owner": -1}, "some messages of its channel depend on the cut, and others do not"),
    ],
)
def test_conditions_are_ones_that_can_be(changes: dict[str, int], message: str) -> None:
    schedules = oktopk()
    index = index_of(schedules[0], Kind.SEND, region=1)
    assert message in said([with_step(schedules[0], index, **changes), *schedules[1:]])


def test_owners_are_found_once_and_of_as_many_regions() -> None:
    schedules = oktopk()
    index = index_of(schedules[2], Kind.CUT)
    twice = replace(schedules[2], steps=(*schedules[2].steps, schedules[2].steps[index]))
    assert "owners are found once" in said([*schedules[:2], twice])
    assert "the ranks cut different numbers of regions: [4, 4, 3]" in said(
        [*schedules[:2], with_step(schedules[2], index, count=3)]
    )


def test_a_memory_keeps_what_a_sum_lost_after_what_its_parts_lost() -> None:
    operation = Operation("all_reduce", (64,), 4, feedback=True)
    for plain, twice, message in (
        (True, False, "has not corrected what is summed"),
        (False, True, "has corrected these elements already"),
    ):
        r = Recorder(operation, Topology.even(1, 1), 0)
        part, result = r.slot(64, wide=True, plain=plain), r.slot(64, wide=True)
        r.encode(part, SEND, memory=-1 if plain else 0)
        for _ in range(1 + twice):
            r.sum_encode([part], None, result, None, memory=0)
        r.decode(result, RECV, memory=0)
        assert message in said([r.finish()])
