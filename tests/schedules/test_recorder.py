"""Facts that the recorder finds out, and the schedule that the engine is given."""

from __future__ import annotations

from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import STEP_WORDS, Buffer, Kind, Operation, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.window import Slots, Stage, pipelined


def recorder() -> Recorder:
    return Recorder(Operation("all_reduce", (100,), 4), Topology.even(3, 1), 1)


def test_a_slot_is_written_again_after_its_readers() -> None:
    r = recorder()
    slot = r.slot(10)
    r.encode(slot, Span(Buffer.SEND, 0, 10))
    r.send(slot, 0)
    r.send(slot, 2)
    r.encode(slot, Span(Buffer.SEND, 10, 10))
    assert [step.after for step in r.finish().steps] == [(), (0,), (0,), (1, 2)]


def test_only_sends_wait_for_a_check() -> None:
    r = recorder()
    slot = r.slot(10)
    r.recv(slot, 10, 0)
    r.check(slot)
    r.send(slot, 2)
    r.decode(slot, Span(Buffer.RECV, 0, 10))
    r.recv(slot, 10, 0)
    r.send(slot, 2)  # the slot has received since, and was not checked
    assert [step.after for step in r.finish().steps] == [(), (0,), (1,), (0,), (2, 3), (4,)]


def test_overlapping_spans_are_kept_apart() -> None:
    r = recorder()
    room = r.scratch(20)
    r.copy(Span(Buffer.SEND, 0, 10), Span(Buffer.SCRATCH, room.start, 10))
    r.copy(Span(Buffer.SEND, 10, 10), Span(Buffer.SCRATCH, room.start + 10, 10))
    r.copy(Span(Buffer.SCRATCH, room.start + 5, 10), Span(Buffer.RECV, 0, 10))
    r.copy(Span(Buffer.SEND, 0, 20), room)
    assert [step.after for step in r.finish().steps] == [(), (), (0, 1), (2,)]


def test_slots_are_made_when_they_are_used() -> None:
    r = recorder()
    slots = Slots(r, 3, 10, wide=True)
    assert [slots[k] for k in (0, 1, 0, 3, 4)] == [0, 1, 0, 0, 1]
    assert len(r.finish().slots) == 2
    assert r.finish().slots[0].wide


def test_stages_of_a_pipeline() -> None:
    done: list[str] = []
    pipelined(3, Stage(1, lambda k: done.append(f"a{k}")), Stage(-1, lambda k: done.append(f"b{k}")))
    assert done == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_packed() -> None:
    r = recorder()
    slot = r.slot(10)
    r.recv(slot, 10, 2, 1)
    r.sum_encode([slot], Span(Buffer.SEND, 5, 10), r.slot(10, wide=True), Span(Buffer.RECV, 7, 10), memory=5)
    steps, slots, lists = r.finish().packed()
    assert len(steps) == 2 * STEP_WORDS
    assert list(steps[:9]) == [Kind.RECV, 0, 2, 1, 10, -1, 0, -1, 0]
    assert list(steps[STEP_WORDS:]) == [Kind.SUM_ENCODE, 1, -1, 0, 10, 0, 5, 1, 7, 0, 5, 0, 1, 1, 1, -1, -1]
    assert list(lists) == [0, 0]
    assert list(slots) == [10, 0, 0, 10, 1, 0]
