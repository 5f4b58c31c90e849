"""Run all ranks' steps symbolically: check the content of slots, buffers and memories, and the steps that touch it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.layout import layout
from hybridcomp.schedules.proofs.order import Order
from hybridcomp.schedules.proofs.values import Content, Piece, Values, added
from hybridcomp.schedules.proofs.values import Run as Elements
from hybridcomp.schedules.schedule import Buffer, Kind, Span, Step

_CORRECTED = 1  # elements that error feedback has corrected
_LOST = 2  # corrected elements to which the loss of their sum has been added


@dataclass(slots=True)
class _Held:
    """Content of a slot.

    Attributes:
        runs: values of its message.
        writer: step that wrote the message.
        users: the writer, and the steps that have read the message since.
        received: whether the message came from a peer.
        checked: step that checked the message; -1 for none.
    """

    runs: list[Elements]
    writer: int
    users: list[int] = field(default_factory=list)
    received: bool = False
    checked: int = -1


class Run:
    """Symbolic run of one operation on all ranks.

    Attributes:
        order: order of the steps.
        in_place: whether ``SEND`` and ``RECV`` lie in the same memory.
        values: values that occur.
    """

    def __init__(self, order: Order, in_place: bool) -> None:
        self.order = order
        self.in_place = in_place
        schedules = order.schedules
        self.operation = schedules[0].operation
        self.ranks = len(schedules)
        self.values = Values(self.ranks)
        self._slots: list[dict[int, _Held]] = [{} for _ in schedules]
        self._messages: dict[int, list[Elements]] = {}  # message of each send
        self._buffers: list[dict[Buffer, tuple[Content, int]]] = []
        self._memories = [Content(0) for _ in schedules]
        self._blocks: dict[int, dict[int, int]] = {}  # last step by rank and block of its memory
        self._borders: dict[int, tuple[int, ...]] = {}  # for each rank, the borders of its regions
        self._cuts: dict[int, int] = {}  # for each rank, the step that found their owners
        self._room: list[dict[Buffer, int]] = []
        for schedule in schedules:
            found = layout(self.operation, self.ranks, schedule.rank)
            self._room.append(
                {Buffer.SEND: found.send, Buffer.RECV: found.recv, Buffer.SCRATCH: schedule.scratch}
            )
            both = Content(max(found.send + found.send_at, found.recv + found.recv_at)) if in_place else None
            send, recv = both or Content(found.send), both or Content(found.recv)
            send_at, recv_at = (found.send_at, found.recv_at) if in_place else (0, 0)
            send.fill(send_at, found.send, schedule.rank)
            self._buffers.append(
                {
                    Buffer.SEND: (send, send_at),
                    Buffer.RECV: (recv, recv_at),
                    Buffer.SCRATCH: (Content(schedule.scratch), 0),
                }
            )
            if self.operation.feedback:
                memory = self._memories[schedule.rank] = Content(found.send)
                memory.fill(0, found.send, 0)

    def play(self) -> None:
        """Run all steps.

        Raises:
            ScheduleError: there is a race, a read of unwritten elements, or a message that does not fit.
        """
        steps = self.order.steps
        for event in self.order.events:
            g, ends = event >> 1, event & 1
            if ends != (steps[g].kind is Kind.SEND):  # a message has the values of its send's begin
                try:
                    self._do(g, steps[g])
                except ScheduleError:
                    raise
                except ValueError as error:
                    self.order.fail(g, str(error))

    def result(self, rank: int, start: int, count: int) -> list[Elements]:
        """Return the values in a range of a rank's ``RECV``."""
        content, offset = self._buffers[rank][Buffer.RECV]
        return content.runs(offset + start, count)

    # -- steps ---------------------------------------------------------------------------------------

    def _do(self, g: int, step: Step) -> None:
        if step.region >= 0:
            self._conditional(g)
        match step.kind:
            case Kind.SEND:
                self._send(g, step)
            case Kind.RECV:
                self._receive(g, step)
            case Kind.CHECK:
                self._message(g, step.slot, step.count)
                self._slots[self.order.rank[g]][step.slot].checked = g
            case Kind.SIZES:
                self._sizes(g, step)
            case Kind.CUT:
                self._cut(g, step)
            case _:
                self._compute(g, step)

    def _compute(self, g: int, step: Step) -> None:
        match step.kind:
            case Kind.ENCODE:
                assert step.span is not None
                runs = self._read(g, step.span)
                self._correct(g, step, runs)
                wide = step.span.buffer is Buffer.SCRATCH or self.operation.part_wide
                self._put(g, step, self._encoded(g, step, runs, wide))
            case Kind.DECODE:
                assert step.out is not None
                runs = self._message(g, step.slot, step.count)
                self._follow(g, step, runs)
                self._write(g, step.out, runs)
            case Kind.SUM:
                assert step.out is not None
                runs = self._sum(g, step)
                if step.out.buffer is not Buffer.SCRATCH:
                    self._whole(runs, "writes", "to the caller's buffer")
                    if step.span is not None:
                        self._correct(g, step, runs)
                self._write(g, step.out, runs)
            case Kind.SUM_ENCODE:
                runs = self._sum(g, step)
                self._correct(g, step, runs)
                total = all(self.values[value].total for _, value, _ in runs)
                message = self._encoded(g, step, runs, self.operation.sum_wide if total else True)
                self._put(g, step, message)
                if step.out is not None:
                    self._whole(runs, "writes", "to the caller's buffer")
                    self._write(g, step.out, message)
            case Kind.COPY:
                assert step.span is not None
                assert step.out is not None
                self._write(g, step.out, self._read(g, step.span))
            case _:
                raise AssertionError(f"nobody says what {step.kind!r} does")

    def _send(self, g: int, step: Step) -> None:
        runs = self._message(g, step.slot, step.count)
        held = self._slots[self.order.rank[g]][step.slot]
        if held.received and (held.checked < 0 or not self.order.before[g] & self.order.bits[held.checked]):
            raise ValueError("it sends on what was not checked before")
        self._messages[g] = runs

    def _receive(self, g: int, step: Step) -> None:
        sender = self.order.sender[g]
        sent = self.order.steps[sender]
        mine = self.order.schedules[self.order.rank[g]].slots[step.slot]
        theirs = self.order.schedules[self.order.rank[sender]].slots[sent.slot]
        for what, expected, got in (
            ("elements", step.count, sent.count),
            ("wide", mine.wide, theirs.wide),
            ("plain", mine.plain, theirs.plain),
            ("sizes", mine.sizes, theirs.sizes),
        ):
            if expected != got:
                raise ValueError(f"it expects {what} {expected}, and gets {got}: {self.order.name(sender)}")
        self._put(g, step, self._messages[sender])

    def _sum(self, g: int, step: Step) -> list[Elements]:
        addends = [] if step.span is None else [self._read(g, step.span)]
        addends += [self._message(g, slot, step.count) for slot in step.slots]
        if not addends:
            raise ValueError("there is nothing to sum")
        return added(self.values, addends, step.divide)

    def _encoded(self, g: int, step: Step, runs: list[Elements], wide: bool) -> list[Elements]:
        """Return the values in a step's message."""
        slot = self.order.schedules[self.order.rank[g]].slots[step.slot]
        if slot.sizes:
            raise ValueError("the slot is for sizes of messages")
        if not slot.wide and step.span is not None and step.span.buffer is Buffer.SCRATCH:
            self._whole(runs, "encodes", "in the caller's dtype")
        if slot.plain:
            return runs
        if wide > slot.wide or (wide < slot.wide and step.kind is Kind.ENCODE):
            kinds = ("the caller's", "the accumulator's")
            raise ValueError(
                f"the slot is of {kinds[slot.wide]} dtype, the message should be of {kinds[wide]}"
            )
        return [(count, self.values.encoded(value, g), source) for count, value, source in runs]

    def _whole(self, runs: list[Elements], does: str, where: str) -> None:
        if not all(self.values[value].total for _, value, _ in runs):
            raise ValueError(f"it {does} the sum of some ranks' parts {where}, which rounds it")

    # -- the owners of regions ---------------------------------------------------------------------------

    def _sizes(self, g: int, step: Step) -> None:
        """Write the sizes of this rank's own messages, one for each region, in order."""
        rank = self.order.rank[g]
        borders = [0]
        for slot in step.slots:
            for count, value, source in self._message(g, slot, None):
                known = self.values[value]
                if source != borders[-1] or (known.ranks, known.sums) != ((rank,), 0):
                    raise ValueError(f"slot {slot} has not this rank's own elements from {borders[-1]} on")
                borders.append(source + count)
        if len(borders) != step.count + 1 or borders[-1] != self._room[rank][Buffer.SEND]:
            raise ValueError(f"the messages have {len(borders) - 1} regions, which end at {borders[-1]}")
        if not self.order.schedules[rank].slots[step.slot].sizes:
            raise ValueError("the slot is not for sizes of messages")
        self._borders[rank] = tuple(borders)
        self._put(g, step, [(step.count, self.values.sizes(rank, tuple(borders)), 0)])

    def _cut(self, g: int, step: Step) -> None:
        """Check that the owners are found from all ranks' sizes, in rank order, for the same regions."""
        rank = self.order.rank[g]
        wanted = [self.values.sizes(q, self._borders.get(rank, ())) for q in range(self.ranks)]
        found = [self._message(g, slot, step.count)[0][1] for slot in step.slots]
        if found != wanted:
            raise ValueError("it does not cut by the sizes of all ranks' messages of these regions")
        self._cuts[rank] = g

    def _conditional(self, g: int) -> None:
        """Check that the owner of a step's region is known before the step begins."""
        cut = self._cuts.get(self.order.rank[g])
        if cut is None:
            raise ValueError("it begins before the owner of its region is known")
        self._after(g, cut, "the owners of regions")

    # -- the memory of error feedback --------------------------------------------------------------------

    def _correct(self, g: int, step: Step, runs: list[Elements]) -> None:
        """Correct by the memory the elements that a step encodes or takes as they are, once for each element.

        A sum of messages alone has been corrected already: the memory adds the loss of the sum's own message.
        """
        plain = step.slot >= 0 and self.order.schedules[self.order.rank[g]].slots[step.slot].plain
        if not self._remembers(step, runs, not plain):
            return
        memory = self._memories[self.order.rank[g]]
        pieces = memory.pieces(step.memory, step.count)
        self._touch(g, pieces, "the memory of error feedback", writes=True)
        after = _LOST if step.kind is Kind.SUM_ENCODE and step.span is None else _CORRECTED
        if any(piece.value >= after for piece in pieces):
            raise ValueError("the memory of error feedback has corrected these elements already")
        if any(piece.value < after - 1 for piece in pieces):
            raise ValueError("the memory of error feedback has not corrected what is summed")
        blocks = self._blocks.setdefault(self.order.rank[g], {})
        for block in step.memory_edges:
            if block in blocks:
                self._after(g, blocks[block], f"block {block} of the memory of error feedback")
            blocks[block] = g
        memory.write(step.memory, [(step.count, after, step.memory)], g)

    def _follow(self, g: int, step: Step, runs: list[Elements]) -> None:
        """Update the memory by a result."""
        total = all(self.values[value].total for _, value, _ in runs)
        if self._remembers(step, runs, total):
            pieces = self._memories[self.order.rank[g]].pieces(step.memory, step.count)
            self._touch(g, pieces, "the memory of error feedback", writes=True)
            for piece in pieces:
                piece.writer, piece.users = g, [g]

    def _remembers(self, step: Step, runs: list[Elements], wanted: bool) -> bool:
        wanted = wanted and self.operation.feedback
        if wanted != (step.memory >= 0):
            raise ValueError(f"it {'needs' if wanted else 'has'} a part of the memory of error feedback")
        if not wanted:
            return False
        if step.memory + step.count > self._memories[0].size:
            raise ValueError("its part of the memory of error feedback ends beyond it")
        if len({source - at for at, source in _places(runs)}) > 1 or runs[0][2] != step.memory:
            raise ValueError(f"its part of the memory of error feedback should begin at {runs[0][2]}")
        return True

    # -- slots and buffers -----------------------------------------------------------------------------

    def _message(self, g: int, slot: int, count: int | None) -> list[Elements]:
        """Read a slot, which must hold ``count`` elements; None for any number."""
        held = self._slots[self.order.rank[g]].get(slot)
        if held is None:
            raise ValueError(f"slot {slot} is read before it is written")
        self._after(g, held.writer, f"slot {slot}")
        held.users.append(g)
        sizes, kind = self.order.schedules[self.order.rank[g]].slots[slot].sizes, self.order.steps[g].kind
        if kind is not Kind.SEND and sizes != (kind is Kind.CUT):
            raise ValueError(f"slot {slot} holds {'sizes, and no' if sizes else 'no sizes, but'} elements")
        length = sum(run[0] for run in held.runs)
        if count is not None and length != count:
            raise ValueError(f"slot {slot} holds {length} elements, not {count}")
        return held.runs

    def _put(self, g: int, step: Step, runs: list[Elements]) -> None:
        """Write a slot."""
        rank = self.order.rank[g]
        room = self.order.schedules[rank].slots[step.slot].count
        if step.count > room:
            raise ValueError(f"slot {step.slot} has room for {room} elements, not {step.count}")
        held = self._slots[rank].get(step.slot)
        for user in reversed(held.users) if held is not None else ():
            self._after(g, user, f"slot {step.slot}")
        self._slots[rank][step.slot] = _Held(runs, g, [g], step.kind is Kind.RECV)

    def _read(self, g: int, span: Span) -> list[Elements]:
        content, start = self._find(g, span)
        if any(piece.value < 0 for piece in content.pieces(start, span.count)):
            raise ValueError(f"{span.buffer.name}[{span.start}:{span.stop}] is read before it is written")
        self._touch(g, content.pieces(start, span.count), span.buffer.name, writes=False)
        return content.runs(start, span.count)

    def _write(self, g: int, span: Span, runs: Sequence[Elements]) -> None:
        content, start = self._find(g, span)
        self._touch(g, content.pieces(start, span.count), span.buffer.name, writes=True)
        if sum(run[0] for run in runs) != span.count:
            raise ValueError(f"it writes {sum(run[0] for run in runs)} elements to {span.count}")
        content.write(start, runs, g)

    def _find(self, g: int, span: Span) -> tuple[Content, int]:
        rank = self.order.rank[g]
        room = self._room[rank][span.buffer]
        if not (span.start >= 0 and span.count > 0 and span.stop <= room):
            raise ValueError(f"{span.buffer.name}[{span.start}:{span.stop}] is not within {room} elements")
        content, offset = self._buffers[rank][span.buffer]
        return content, offset + span.start

    def _touch(self, g: int, pieces: Sequence[Piece], what: str, *, writes: bool) -> None:
        for piece in pieces:
            if writes:
                for user in reversed(piece.users):
                    self._after(g, user, what)
            elif piece.writer >= 0:
                self._after(g, piece.writer, what)
            if not writes:
                piece.users.append(g)

    def _after(self, g: int, other: int, what: str) -> None:
        """Check that a step begins after another has ended."""
        if g != other and not self.order.before[g] & self.order.bits[other]:
            raise ValueError(
                f"nothing keeps it apart from the other user of {what}: {self.order.name(other)}"
            )


def _places(runs: list[Elements]) -> list[tuple[int, int]]:
    """Return the offset of each run in the message, and at its source."""
    result, at = [], 0
    for count, _, source in runs:
        result.append((at, source))
        at += count
    return result
