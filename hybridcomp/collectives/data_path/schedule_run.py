"""Run a schedule in Python, step by step, over a carrier: in a device's memory, or over a backend of torch's.

Steps are done in the order of the schedule, and a message is waited for where a step reads it:
:mod:`hybridcomp.schedules.in_order` proves that no rank waits for ever, and that few tags suffice for all channels.
Every message has a header and a CRC; the messages of plain slots are by the codec ``none``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, assert_never

import numpy as np

from hybridcomp.arrays import DType, Flat
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.schedules import cuts
from hybridcomp.schedules.in_order import TAGS
from hybridcomp.schedules.prepared import Prepared, PreparedStep
from hybridcomp.schedules.schedule import Buffer, Kind, Schedule, Span, Step


@dataclass(slots=True)
class _Held:
    """Content of a slot.

    Attributes:
        message: message that was encoded here or received.
        received: whether it came from another rank.
        own: message that was encoded here, in the form that sums take; for a message of sizes, the sizes.
        here: whether it has arrived.
        passing: checked message, to be sent on.
        sent: whether a message that was encoded here was sent.
    """

    message: Any
    received: bool = False
    own: Any = None
    here: bool = False
    passing: Any = None
    sent: bool = False


def run_schedule(
    carrier: Carrier,
    prepared: Prepared,
    send: Flat | None,
    recv: Flat | None,
    tags: Sequence[int],
    memory: Any = None,
    fold: np.ufunc | None = None,
) -> Steps:
    """Run a schedule on two arrays, in the kind of memory that its carrier serves.

    Args:
        carrier: codec, transport and statistics.
        prepared: schedule of this rank.
        send, recv: the arrays; None where the schedule uses none.
        tags: tags of the messages, as many as :data:`~hybridcomp.schedules.in_order.TAGS`.
        memory: error-feedback memory, whose step has begun; None for none.
        fold: ufunc that reduces two arrays, for sums of integers in host memory; None for codecs' sums.

    Raises:
        WireError, MismatchError: a peer's message is damaged or unexpected.
    """
    run = _Run(carrier, prepared.schedule, send, recv, tags, memory, fold)
    with carrier.transport.keeping(run):
        for group in prepared.groups:
            if group.step.region < 0 or run.does(group.step):
                yield from run.do(group)
        yield from run.mailbox.finish()


class _Run:
    """One run of a schedule on this rank."""

    def __init__(
        self,
        carrier: Carrier,
        schedule: Schedule,
        send: Flat | None,
        recv: Flat | None,
        tags: Sequence[int],
        memory: Any,
        fold: np.ufunc | None,
    ) -> None:
        assert len(tags) == TAGS
        self.mailbox = carrier.mailbox()
        self._carrier, self._schedule, self._tags = carrier, schedule, tags
        self._memory, self._fold = memory, fold
        self._narrow, self._wide = carrier.dtype, carrier.dtype.accumulator
        plain = any(slot.plain for slot in schedule.slots)
        self._plain = carrier.alike(codec=NONE) if plain else carrier
        self._arrays: dict[Buffer, Any] = {
            Buffer.SEND: None if send is None else send.data,
            Buffer.RECV: None if recv is None else recv.data,
            Buffer.SCRATCH: carrier.room(schedule.scratch, self._wide) if schedule.scratch else None,
        }
        # For elements of the scratch memory, which have the accumulator's dtype.
        self._widened = carrier.alike(dtype=self._wide) if schedule.scratch else carrier
        # For messages of sizes, which only a schedule with regions has.
        self._ledger = carrier.alike(codec=NONE, dtype=DType.UINT32) if schedule.regions else carrier
        # Of each slot the data path of its codec, and its dtype: steps ask often.
        self._by = [
            self._ledger if slot.sizes else self._plain if slot.plain else carrier for slot in schedule.slots
        ]
        self._kind = [
            DType.UINT32 if slot.sizes else self._wide if slot.wide else self._narrow
            for slot in schedule.slots
        ]
        self._owners: dict[int, int] = {}
        self._held: dict[int, _Held] = {}

    def does(self, step: Step) -> bool:
        """Tell whether a step of a region is carried out: only where the region went to the step's owner."""
        return self._owners[step.region] == step.owner

    def do(self, group: PreparedStep) -> Steps:
        """Do a step, or send a message to several ranks."""
        step = group.step
        match step.kind:
            case Kind.ENCODE:
                self._made(group, self._encode(step))
            case Kind.SEND:
                self._send(group)
            case Kind.RECV:
                carrier, n = self._by[step.slot], step.count
                room = carrier.inbox_bytes(n, self._kind[step.slot])
                message: Any = self.mailbox.receive(room, step.peer, self._tags[group.tag])
                carrier.foresee(message, n, self._kind[step.slot])
                self._held[step.slot] = _Held(message, received=True)
            case Kind.CHECK:
                yield from self._arrival([step.slot])
                held = self._held[step.slot]
                held.passing = self._by[step.slot].checked(held.message, step.count, self._kind[step.slot])
            case Kind.DECODE:
                yield from self._arrival([step.slot])
                self._decode(step)
            case Kind.SUM:
                yield from self._arrival(step.slots)
                self._sum(step)
            case Kind.SUM_ENCODE:
                yield from self._arrival(step.slots)
                self._made(group, self._sum_encode(step))
            case Kind.COPY:
                assert step.span is not None
                assert step.out is not None
                self._carrier.copy(self._at(step.span), self._at(step.out))
            case Kind.SIZES:
                sizes = [self._held[slot].message.nbytes for slot in step.slots]
                message = self._ledger.encode(np.array(sizes, np.uint32))
                self._held[step.slot] = _Held(message, own=sizes, here=True)
            case Kind.CUT:
                yield from self._arrival([slot for slot in step.slots if self._held[slot].received])
                self._cut(step)
            case _:
                assert_never(step.kind)

    def _arrival(self, slots: Sequence[int]) -> Steps:
        """Wait until the messages in slots are here, and until this rank's own messages can be summed."""
        held = [self._held[slot] for slot in slots]
        coming = [one.message for one in held if not one.here]
        events = [event for one in held if one.own is not None for event in one.own.events]
        if coming or events:
            arrival: Pending = self.mailbox.arrival(coming)
            yield arrival._replace(events=[*arrival.events, *events])
        for one in held:
            one.here = True

    # -- messages ------------------------------------------------------------------------------------

    def _made(self, group: PreparedStep, message: Any) -> None:
        """Put a message that was encoded here into its slot."""
        slot, own = group.step.slot, None
        if group.summed:
            own = self._by[slot].own_message(message, group.step.count, self._kind[slot])
        self._held[slot] = _Held(message, own=own, here=True)

    def _send(self, group: PreparedStep) -> None:
        step, peers = group.step, list(group.peers)
        held = self._held[step.slot]
        if held.passing is not None:
            self.mailbox.forward(held.passing, peers, self._tags[group.tag])
        else:
            self.mailbox.send(held.message, peers, self._tags[group.tag], keep=group.kept)
            held.sent = True

    def _encode(self, step: Step) -> Any:
        assert step.span is not None
        data = self._at(step.span)
        if step.memory >= 0:
            return self._of(step.span).encode_with_feedback(data, self._memory, step.part)
        return self._by[step.slot].encode(data, self._kind[step.slot])

    def _decode(self, step: Step) -> None:
        assert step.out is not None
        held, out = self._held[step.slot], self._at(step.out)
        carrier, kind = self._by[step.slot], self._kind[step.slot]
        if step.memory < 0:
            decode = carrier.decode if held.received else carrier.decode_own
            decode(held.message, out, kind)
        else:
            follow = carrier.decode_result if held.received else carrier.decode_own_result
            follow(held.message, out, self._memory, step.part)

    def _cut(self, step: Step) -> None:
        """Find the owner of each region, from all ranks' sizes."""
        weights = np.zeros(step.count, np.uint64)
        sizes = np.empty(step.count, np.uint32)
        for slot in step.slots:
            held = self._held[slot]
            if held.received:
                self._ledger.decode(held.message, sizes)
                weights += sizes
            else:
                weights += np.array(held.own, np.uint64)
        owned = cuts.balanced(weights.tolist(), self._schedule.ranks)
        self._owners = {region: owner for owner, regions in enumerate(owned) for region in regions}

    # -- sums ----------------------------------------------------------------------------------------

    def _sum(self, step: Step) -> None:
        assert step.out is not None
        carrier, out = self._carrier, self._at(step.out)
        if step.span is None:
            carrier.store(self._total(step, out), out, self._ranks(step))
        elif step.out.buffer is Buffer.SCRATCH:
            self._sum_to_scratch(step, step.span, out)
        elif self._in_one(step, step.span):
            plain, messages, source = self._addends(step)
            carrier.sum_into(self._at(step.span), messages, source, self._ranks(step), out, plain)
        else:
            carrier.store(self._accumulated(step, step.span), out, self._ranks(step))

    def _total(self, step: Step, out: Any) -> Any:
        """Add all ranks' messages to zeros, in the order of the ranks."""
        held = [self._held[slot] for slot in step.slots]
        (own,) = (one for one in held if not one.received)
        messages = [one.message for one in held if one.received]
        total = self._carrier.total(messages, own.own, out, self._kind[step.slots[0]])
        if not own.sent:
            self._carrier.release(own.message)
        return total

    def _sum_to_scratch(self, step: Step, span: Span, out: Any) -> None:
        if span == step.out:
            self._add(step, out)
            return
        plain, messages, source = self._addends(step)
        if not self._in_one(step, span) or (plain and messages):
            self._carrier.copy(self._accumulated(step, span), out)
            return
        carrier = self._plain if plain else self._carrier
        acc = carrier.summed(self._at(span), plain or messages, source)
        carrier.copy(acc, out)
        carrier.spent(acc)

    def _sum_encode(self, step: Step) -> Any:
        span = step.span
        out = None if step.out is None else self._at(step.out)
        carrier, kind, ranks = self._by[step.slot], self._kind[step.slot], self._ranks(step)
        if span is None:
            acc = self._total(step, self._carrier.room(step.count, self._narrow) if out is None else out)
        elif self._in_one(step, span):
            plain, messages, source = self._addends(step)
            return carrier.sum_encode(self._at(span), messages, source, kind, ranks, out, plain)
        else:
            acc = self._accumulated(step, span)
        if step.memory >= 0:
            message = carrier.encode_sum_with_feedback(acc, self._memory, step.part, ranks)
            if out is not None:
                carrier.decode_own_result(message, out, self._memory, step.part)
        else:
            message = carrier.encode_sum(acc, kind, ranks)
            if out is not None:
                carrier.decode_own(message, out, kind)
        return message

    def _in_one(self, step: Step, span: Span) -> bool:
        """Tell whether a codec sums messages and the own part in one pass: data as they are, messages of one dtype."""
        alike = len({self._kind[slot] for slot in self._split(step)[1]}) < 2
        return alike and step.memory < 0 and span.buffer is not Buffer.SCRATCH and self._fold is None

    def _accumulated(self, step: Step, span: Span) -> Any:
        """Return a new accumulator with a step's sum."""
        data = self._at(span)
        if self._fold is not None:
            return self._folded(step, data, self._fold)
        acc = self._of(span).own(data, self._memory if step.memory >= 0 else None, step.part)
        self._add(step, acc)
        return acc

    def _add(self, step: Step, acc: Any) -> None:
        plain, others = self._split(step)
        if plain:
            self._plain.add(self._messages(plain), acc, self._narrow)
        # Messages from leaves of a tree do not have the accumulator's dtype, messages from branches do.
        for kind, slots in groupby(others, self._kind.__getitem__):
            self._carrier.add(self._messages(slots), acc, kind)

    def _folded(self, step: Step, data: Any, fold: np.ufunc) -> Any:
        acc, part = data.copy(), np.empty_like(data)
        for slot in step.slots:
            self._carrier.decode(self._held[slot].message, part)
            fold(acc, part, out=acc)
        return acc

    def _addends(self, step: Step) -> tuple[list[Any], list[Any], DType]:
        """Return a sum's plain messages, which are added first, the others, and the dtype of the first other one."""
        plain, others = self._split(step)
        source = self._kind[others[0]] if others else self._narrow
        return self._messages(plain), self._messages(others), source

    def _split(self, step: Step) -> tuple[list[int], list[int]]:
        """Return the slots of a sum whose messages are plain, and its other slots."""
        slots = self._schedule.slots
        return [at for at in step.slots if slots[at].plain], [at for at in step.slots if not slots[at].plain]

    def _messages(self, slots: Iterable[int]) -> list[Any]:
        return [self._held[slot].message for slot in slots]

    # -- spans, slots, tags --------------------------------------------------------------------------

    def _at(self, span: Span) -> Any:
        return self._arrays[span.buffer][span.start : span.stop]

    def _of(self, span: Span) -> Carrier:
        """Return the data path of a span's dtype."""
        return self._widened if span.buffer is Buffer.SCRATCH else self._carrier

    def _ranks(self, step: Step) -> int:
        return self._schedule.ranks if step.divide else 1
