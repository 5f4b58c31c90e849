"""Every algorithm passes the symbolic check, and no schedule that was spoiled does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hybridcomp.schedules import cuts
from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.layout import REDUCTIONS, WHOLE, layout
from hybridcomp.schedules.proofs.order import Order
from hybridcomp.schedules.proofs.run import Run
from hybridcomp.schedules.proofs.values import Promise, host_order, owner_first, rank_order
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.schedule import Buffer, Kind, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.verify import verify
from tests.schedules.cases import (
    PAIRS,
    built,
    check,
    operation,
    swapped,
    with_step,
    without_dependencies,
    without_order_of_memory,
    without_step,
)

MODES = (
    {},
    {"plain": True},
    {"exact": True},
    {"feedback": True},
    {"mean": True},
    {"plain": True, "mean": True},
    {"exact": True, "mean": True},
    {"feedback": True, "mean": True},
)
HOSTS = ("hierarchical", "two_level")
UNEVEN = (Topology((0, 0, 1)), Topology((0, 1, 1, 0, 2)), Topology((0, 0, 0, 1, 1, 2, 3, 3)))


def modes(kind: str, name: str) -> list[dict[str, bool]]:
    """Return what an algorithm can be asked for."""
    feedback, mean = ALGORITHMS[kind][name].feedback, kind in REDUCTIONS
    return [how for how in MODES if feedback >= ("feedback" in how) and mean >= ("mean" in how)]


def topologies(kind: str, name: str, ranks: int) -> list[Topology]:
    """Return the topologies that make a difference."""
    found = [Topology.even(ranks, each) for each in (1, 2, 3, 4)] + [
        t for t in UNEVEN if len(t.hosts) == ranks
    ]
    found = [t for t in found if ALGORITHMS[kind][name].refuses(t) is None]
    return found if name in HOSTS else found[:1]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_few_ranks(kind: str, name: str) -> None:
    """All edge sizes, in every mode."""
    cases = 0
    for ranks in range(1, 8):
        for topology in topologies(kind, name, ranks):
            sizes = {0, 1, ranks - 1, ranks + 1, 63, 64, 65}
            if kind in WHOLE:
                sizes |= {63 * ranks, 65 * ranks, 129 * ranks + 1}
            for n in sorted(sizes):
                # All modes on up to four ranks; on more each size takes another two of them.
                able = modes(kind, name)
                for how in able if ranks < 5 else (able[n % len(able)], able[(n + 3) % len(able)]):
                    check(kind, name, topology, n, root=n % ranks, **how)
                    cases += 1
    assert cases >= (14 if kind == "send" else 100), cases


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_many_chunks(kind: str, name: str) -> None:
    """More chunks than any pipeline has room for, the last one short."""
    cases = 0
    for ranks in (2, 3, 5):
        for topology in topologies(kind, name, ranks):
            n = (64 * 11 + 9) * (ranks if kind == "all_reduce" else 1)
            how = modes(kind, name)
            check(kind, name, topology, n, root=ranks - 1, **how[ranks % len(how)])
            cases += 1
    assert cases


@pytest.mark.parametrize(("kind", "name"), [pair for pair in PAIRS if pair[0] != "send"])
def test_many_ranks(kind: str, name: str) -> None:
    """A sample: one size and mode for each number of ranks, with another one's turn at the next."""
    few = kind in ("all_to_all", "all_gather") or name in ("one_shot", "sparse", "oktopk", *HOSTS)
    for ranks in (6, 7, 8, 11, 16, 17, 33):
        if few and ranks == 33:
            continue
        how = modes(kind, name)[ranks % len(modes(kind, name))]
        n = (65, 3, 130, 1)[ranks % 4]
        topology = topologies(kind, name, ranks)[ranks % len(topologies(kind, name, ranks))]
        check(kind, name, topology, n, root=ranks // 2, **how)


@pytest.mark.parametrize(("kind", "name"), [pair for pair in PAIRS if pair[0] not in WHOLE])
def test_parts_of_very_different_sizes(kind: str, name: str) -> None:
    for topology in topologies(kind, name, 5):
        of = operation(kind, 5, 1)
        counts = [0, 700, 1, 0, 64] * (len(of.counts) // 5)
        algorithm = ALGORITHMS[kind][name]
        for least in (0, 300):  # bytes of parts that travel as they are
            of = replace(of, counts=tuple(counts), least=least)
            verify(built(algorithm, of, topology), algorithm.promise)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("kind", "name"), [pair for pair in PAIRS if pair[0] in REDUCTIONS])
def test_as_many_errors_add_up_as_promised(kind: str, name: str, mean: bool) -> None:
    """Verified to be no more; and some element of the result has as many, of parts and of sums."""
    promise = ALGORITHMS[kind][name].promise
    for ranks in range(1, 8):
        for topology in topologies(kind, name, ranks):
            schedules = check(kind, name, topology, 130 * ranks, root=ranks // 2, mean=mean)
            run = Run(Order(next(iter(cuts.cases(schedules)))), in_place=False)
            run.play()
            sizes = [layout(run.operation, ranks, rank).recv for rank in range(ranks)]
            found = {
                (run.values[number].losses, run.values[number].sums)
                for rank, size in enumerate(sizes)
                for _, number, _ in run.result(rank, 0, size)
            }
            wanted = promise.losses(topology)
            assert tuple(map(max, zip(*found, strict=True))) == wanted, (ranks, topology)
            parts = wanted[0] / ranks if mean else wanted[0]
            assert promise.encodings(topology, mean=mean) == pytest.approx(parts + wanted[1] or 1)


@pytest.mark.parametrize("how", modes("all_reduce", "ring"))
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_ring_has_the_bits_of_direct(kind: str, how: dict[str, bool]) -> None:
    """The same chunks are encoded, and added in the same order."""
    if kind == "all_gather":
        how = {key: value for key, value in how.items() if key in ("plain", "exact")}
    told = []
    for name in ("direct", "ring"):
        run = Run(Order(check(kind, name, Topology.even(5, 1), 64 * 7 + 5, **how)), in_place=False)
        run.play()
        found = []
        for rank in range(5):
            n = layout(run.operation, 5, rank).recv
            found.append(
                [(count, run.values[value], source) for count, value, source in run.result(rank, 0, n)]
            )
        told.append(found)
    assert told[0] == told[1]


# -- spoiled schedules ----------------------------------------------------------------------------------


def spoilable(kind: str, name: str) -> list[tuple[list[Schedule], Promise]]:
    """Return schedules with more chunks than there is room for."""
    found = []
    topology = Topology((0, 1, 1, 0)) if name in HOSTS else Topology.even(2 if kind == "send" else 3, 1)
    ranks = len(topology.hosts)
    for feedback in {False, ALGORITHMS[kind][name].feedback}:
        n = (64 * 6 + 5) * (
            ranks if kind == "all_reduce" and name not in ("sparse", "one_shot", "oktopk") else 1
        )
        schedules = check(kind, name, topology, n, feedback=feedback)
        found.append((schedules, ALGORITHMS[kind][name].promise))
    return found


def passes(schedules: list[Schedule], rank: int, mutant: Schedule, promise: Promise) -> bool:
    try:
        verify([*schedules[:rank], mutant, *schedules[rank + 1 :]], promise)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_no_step_can_be_left_out(kind: str, name: str) -> None:
    for schedules, promise in spoilable(kind, name):
        for rank, schedule in enumerate(schedules):
            every = 1 if len(schedule.steps) < 40 else 3  # a third: what is left out repeats with each chunk
            for index in range(rank % every, len(schedule.steps), every):
                assert not passes(schedules, rank, without_step(schedule, index), promise), (rank, index)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_no_dependency_can_be_left_out(kind: str, name: str) -> None:
    """Every dependency is needed, also those that another rank's messages might have implied."""
    for schedules, promise in spoilable(kind, name):
        for rank, schedule in enumerate(schedules[:2]):
            for what, mutant in without_dependencies(schedule):
                assert not passes(schedules, rank, mutant, promise), (rank, what)


@pytest.mark.parametrize("name", ["direct", "ring", "hierarchical", "oktopk"])
def test_blocks_of_the_memory_are_rounded_in_one_order(name: str) -> None:
    operation = Operation("all_reduce", (1167,), 4, feedback=True, chunk_bytes=768)
    topology = Topology.even(4, 2)
    algorithm = ALGORITHMS["all_reduce"][name]
    schedules = [algorithm.build(operation, topology, rank) for rank in range(4)]
    verify(schedules, algorithm.promise)
    assert not all(
        passes(schedules, rank, without_order_of_memory(schedule), algorithm.promise)
        for rank, schedule in enumerate(schedules)
    )


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_messages_must_meet(kind: str, name: str) -> None:
    """Another count, another peer, another channel, or two sends of one channel in the other order."""
    schedules, promise = spoilable(kind, name)[0]
    for rank, schedule in enumerate(schedules):
        last: dict[tuple[int, int, Kind], int] = {}
        for index, step in enumerate(schedule.steps):
            if step.kind not in (Kind.SEND, Kind.RECV):
                continue
            changes = [{"count": step.count - 1}, {"channel": step.channel + 1}, {"peer": rank}]
            changes += [{"peer": (step.peer + 1) % len(schedules)}]
            for change in changes[index % 4 :][:2]:
                assert not passes(schedules, rank, with_step(schedule, index, **change), promise), (
                    rank,
                    index,
                )
            line = (step.peer, step.channel, step.kind)
            before = last.get(line)
            if before is not None and max(step.after, default=-1) < before and step.kind is Kind.SEND:
                mutant = swapped(schedule, before, index)
                if all(max(s.after, default=-1) < i for i, s in enumerate(mutant.steps)):
                    assert not passes(schedules, rank, mutant, promise), (rank, before, index)
            last[line] = index


# -- what is said ---------------------------------------------------------------------------------------


def direct(n: int = 200, ranks: int = 3, **how) -> list[Schedule]:
    return check("all_reduce", "direct", Topology.even(ranks, 1), n, **how)


def index_of(schedule: Schedule, kind: Kind) -> int:
    return next(i for i, step in enumerate(schedule.steps) if step.kind is kind)


def said(schedules: list[Schedule], promise: Promise | None = None) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(schedules, promise)
    return str(error.value)


def test_a_race_is_named() -> None:
    schedules = direct(64 * 5 * 3)
    index = next(i for i, s in enumerate(schedules[1].steps) if s.kind is Kind.ENCODE and s.after)
    schedules[1] = with_step(schedules[1], index, after=())
    text = said(schedules)
    assert text.startswith(f"rank 1, step {index} (encode SEND[")
    assert "nothing keeps it apart from the other user of slot" in text
    assert re.search(r"of slot (\d+): rank 1, step \d+ \((send|encode) .*slot \1\b", text)


def test_what_was_not_written_is_named() -> None:
    schedules = direct()
    index = index_of(schedules[1], Kind.SEND)
    schedules[1] = with_step(schedules[1], index, after=())
    assert "is read before it is written" in said(schedules)


def test_a_message_that_nobody_receives_is_named() -> None:
    schedules = direct()
    schedules[2] = without_step(schedules[2], index_of(schedules[2], Kind.RECV))
    assert "nobody receives it: rank 2 has" in said(schedules)


def test_a_deadlock_is_named() -> None:
    """Two ranks that each receive before they send."""
    schedules = []
    for rank in range(2):
        r = Recorder(operation("all_to_all", 2, 4), Topology.even(2, 1), rank)
        slots = [r.slot(8), r.slot(8)]
        r.recv(slots[0], r.operation.counts[(1 - rank) * 2 + rank], 1 - rank)
        r.encode(slots[1], Span(Buffer.SEND, 0, r.operation.counts[rank * 2 + 1 - rank]))
        r.send(slots[1], 1 - rank)
        made = r.finish()
        schedules.append(with_step(made, 2, after=(0, 1)))
    text = said(schedules)
    assert text.startswith("deadlock: rank ")
    assert "which waits for rank 0, step 0 (receive slot 0 from rank 1)" in text


def test_synchronous_sends_deadlock_where_buffered_ones_would_not() -> None:
    """Both send before they receive, into one slot: it works only where a send does not wait for its receiver."""
    schedules = []
    for rank in range(2):
        r = Recorder(replace(operation("all_reduce", 2, 8), plain=True), Topology.even(2, 1), rank)
        mine = r.slot(8)
        r.encode(mine, Span(Buffer.SEND, 0, 8))
        r.send(mine, 1 - rank)
        r.recv(mine, 8, 1 - rank)
        r.sum([mine], Span(Buffer.SEND, 0, 8), Span(Buffer.RECV, 0, 8))
        schedules.append(r.finish())
    assert said(schedules).startswith("deadlock: ")


def test_what_is_sent_on_must_be_checked() -> None:
    schedules = check("broadcast", "tree", Topology.even(4, 1), 64)
    rank = next(s.rank for s in schedules if any(step.kind is Kind.CHECK for step in s.steps))
    check_at = index_of(schedules[rank], Kind.CHECK)
    send_at = index_of(schedules[rank], Kind.SEND)
    receive_at = index_of(schedules[rank], Kind.RECV)
    schedules[rank] = with_step(schedules[rank], send_at, after=(receive_at,))
    assert "it sends on what was not checked before" in said(schedules)
    assert check_at < send_at


def test_the_owner_takes_what_the_others_decode() -> None:
    """An owner that keeps its exact sum has other bits than the ranks to which it sends the encoded one."""
    schedules = direct()
    index = index_of(schedules[0], Kind.SUM_ENCODE)
    step = schedules[0].steps[index]
    exact = replace(step, kind=Kind.SUM, slot=-1)
    only_encodes = replace(step, out=None)
    steps = [*schedules[0].steps[: index + 1], replace(exact, after=step.after)]
    steps[index] = only_encodes
    moved = [
        replace(s, after=tuple(sorted({one + (one > index) for one in s.after})))
        for s in schedules[0].steps[index + 1 :]
    ]
    schedules[0] = replace(schedules[0], steps=(*steps, *moved))
    assert "do not take the same messages: their bits may differ" in said(schedules)


def test_the_order_of_a_sum_is_promised() -> None:
    schedules = direct()
    index = index_of(schedules[0], Kind.SUM_ENCODE)
    slots = schedules[0].steps[index].slots
    schedules[0] = with_step(schedules[0], index, slots=slots[::-1])
    assert "the ranks' parts are added in the order (0, 2, 1)" in said(schedules)


def test_a_part_counts_once() -> None:
    schedules = direct()
    index = index_of(schedules[0], Kind.SUM_ENCODE)
    slots = schedules[0].steps[index].slots
    schedules[0] = with_step(schedules[0], index, slots=(slots[0], slots[0]))
    assert "the part of rank 1 is added twice" in said(schedules)


def test_encodings_are_counted() -> None:
    schedules = check("all_reduce", "halving", Topology.even(8, 1), 64)
    assert "parts are encoded 3 times on their way, the sum 1 times" in said(
        schedules, Promise(lambda *_: True)
    )
    assert "the sum 1 times" in said(direct(), Promise(owner_first, sums=0))


@pytest.mark.parametrize("mean", [False, True])
def test_a_mean_is_divided_once(mean: bool) -> None:
    schedules = direct(mean=mean)
    index = index_of(schedules[0], Kind.SUM_ENCODE)
    schedules[0] = with_step(schedules[0], index, divide=not mean)
    assert f"it is {'not ' if mean else ''}divided by the number of ranks" in said(schedules)


def test_a_memory_of_error_feedback_is_where_its_elements_are() -> None:
    schedules = direct(feedback=True)
    index = index_of(schedules[0], Kind.ENCODE)
    memory = schedules[0].steps[index].memory
    wrong = [with_step(schedules[0], index, memory=other) for other in (-1, memory + 1)]
    assert "needs a part of the memory" in said([wrong[0], *schedules[1:]])
    assert f"should begin at {memory}" in said([wrong[1], *schedules[1:]])


def test_sums_of_some_ranks_are_not_rounded() -> None:
    schedules = check("reduce", "tree", Topology.even(4, 1), 10)
    narrow = [replace(s, slots=tuple(replace(slot, wide=False) for slot in s.slots)) for s in schedules]
    assert "message should be of the accumulator's" in said(narrow)


def test_schedules_of_different_operations() -> None:
    schedules = direct()
    assert "ranks 0 and 2 have schedules of different" in said([*schedules[:2], direct(201)[2]])
    assert "schedule 0 of 2 is of rank 0 of 3" in said([schedules[0], schedules[2]])


def test_orders() -> None:
    hosts = Topology((0, 0, 1, 1))
    assert rank_order((0, 1, 2, 3), hosts)
    assert not rank_order((1, 0, 2, 3), hosts)
    assert owner_first((2, 0, 1, 3), hosts)
    assert not owner_first((2, 1, 0, 3), hosts)
    assert host_order((3, 2, 1, 0), hosts)
    assert not host_order((3, 0, 1, 2), hosts)
