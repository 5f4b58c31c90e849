"""Define schedules: the part of one rank in one operation, as data.

An algorithm is a function that records steps (:mod:`.recorder`) and returns a :class:`Schedule`. Nothing here moves
data or imports MPI: the same schedules are verified (:mod:`.verify`), drawn (:mod:`.draw`), costed, and run by the
compiled engine.

Steps work on *spans* of elements in named buffers (:class:`Buffer`), and on *slots*, each of which holds one message at
a time. A step begins when all steps of its ``after`` have ended:

=============  ===================================================================================================
ENCODE         encode ``span`` into ``slot``
SEND           send the message in ``slot`` to ``peer``; ends when the slot may be written again
RECV           receive a message of ``count`` elements from ``peer`` into ``slot``
CHECK          check the received message in ``slot``, so that it can be sent on
DECODE         check the message in ``slot``, and write its values to ``out``
SUM            add the messages in ``slots``, in this order, to ``span`` (to zeros if there is none); write to ``out``
SUM_ENCODE     the same, encoded into ``slot``; ``out``, if any, gets what receivers of the message will decode
COPY           copy ``span`` to ``out``
SIZES          write how many bytes each message in ``slots`` has, one for each region of the data, into ``slot``
CUT            find each region's owner from the sizes in ``slots``, one message for each rank in rank order
=============  ===================================================================================================

A schedule is made before the data are known, but the owner of a region may depend on them (:mod:`.cuts`). So there may
be steps for every possible owner: a step with a ``region`` is carried out only where the cut has given the region to
its ``owner``. Otherwise it ends without doing anything as soon as the steps have ended that it waits for.

Sends to one peer on one *channel* are posted in the order of the schedule, and so are receives: the n-th send meets the
n-th receive. Dependencies are hazards and nothing else: a step waits for the steps that write its input, and for the
steps that use the places it overwrites. A pipeline of chunks is limited by the number of slots that its chunks take in
turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hybridcomp.schedules.shards import CHUNK_BYTES
from hybridcomp.schedules.topology import Topology


class Kind(IntEnum):
    """Kinds of steps; ``Kind`` of kernels/engine/program.hpp has the same numbers."""

    ENCODE = 0
    SEND = 1
    RECV = 2
    CHECK = 3
    DECODE = 4
    SUM = 5
    SUM_ENCODE = 6
    COPY = 7
    SIZES = 8
    CUT = 9


class Buffer(IntEnum):
    """Arrays that spans lie in, with elements of the caller's dtype; of the accumulator's dtype in SCRATCH."""

    SEND = 0
    RECV = 1
    SCRATCH = 2


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation to do, the same on all ranks; a key of caches.

    Attributes:
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ...
        counts: element counts. An all-reduce, a broadcast, a reduce or a send has one; an all-to-all has one for each
            pair of ranks; all others have one for each rank: the count of the part that the rank gets (reduce-scatter,
            scatter) or gives (all-gather, gather).
        itemsize: bytes of an element.
        plain: whether messages are the elements as they are, not encoded.
        exact: whether the codec is lossless: then sums are encoded in the caller's dtype, not in the accumulator's.
        feedback: whether an error-feedback memory corrects parts and sums, in the accumulator's dtype.
        mean: whether sums are divided by the number of ranks.
        root: root rank of operations that have one.
        chunk_bytes: most uncompressed bytes of one message of a pipeline.
        least: parts of fewer bytes travel as they are, not encoded, in a gather, a scatter or an all-to-all, whose
            ranks may not know the sizes of others' parts.
    """

    kind: str
    counts: tuple[int, ...]
    itemsize: int
    plain: bool = False
    exact: bool = False
    feedback: bool = False
    mean: bool = False
    root: int = 0
    chunk_bytes: int = CHUNK_BYTES
    least: int = 0

    def spares(self, count: int) -> bool:
        """Tell whether a part of so many elements travels as it is."""
        return self.plain or count * self.itemsize < self.least

    def memory(self, start: int) -> int:
        """Return the first element of error-feedback memory for a range from ``start`` on; -1 if there is none."""
        return start if self.feedback else -1

    @property
    def part_wide(self) -> bool:
        """Tell whether messages of a rank's own data are of the accumulator's dtype."""
        return self.feedback

    @property
    def sum_wide(self) -> bool:
        """Tell whether messages of sums are of the accumulator's dtype."""
        return self.feedback or not (self.exact or self.plain)


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start`` to ``start + count`` of a buffer."""

    buffer: Buffer
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Return the index of the element after the last one."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for one message at a time.

    Attributes:
        count: elements of the longest message.
        wide: whether its elements are of the accumulator's dtype, not of the caller's.
        plain: whether it holds the elements as they are, not encoded.
        sizes: whether it holds the sizes of messages, a number of 32 bits for each.
    """

    count: int
    wide: bool = False
    plain: bool = False
    sizes: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Step of a schedule: see the module.

    Fields that a kind does not use have their defaults.

    Attributes:
        kind: kind of work.
        after: indices of the steps that must have ended.
        slot: slot of the message that it writes, sends, receives or reads.
        slots: slots of the messages that it sums, or whose sizes it writes, or from which it reads sizes.
        peer: rank to send to, or to receive from.
        channel: channel of a send or receive, from 0.
        count: elements of the message.
        span: elements that it reads.
        out: elements that it writes.
        divide: whether to divide the sum by the number of ranks.
        memory: first element of the error-feedback memory that it corrects and updates; -1 for none.
        region, owner: condition of the step: rank ``owner`` owns the region; -1 for none.
    """

    kind: Kind
    after: tuple[int, ...] = ()
    slot: int = -1
    slots: tuple[int, ...] = ()
    peer: int = -1
    channel: int = 0
    count: int = 0
    span: Span | None = None
    out: Span | None = None
    divide: bool = False
    memory: int = -1
    region: int = -1
    owner: int = -1

    def excludes(self, other: Step) -> bool:
        """Tell whether at most one of the two is ever carried out."""
        return self.region >= 0 and self.region == other.region and self.owner != other.owner

    @property
    def part(self) -> slice:
        """Return the elements of the error-feedback memory that it corrects and updates, if it has any."""
        return slice(self.memory, self.memory + self.count)

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the slots whose messages the step reads."""
        if self.kind in (Kind.SEND, Kind.CHECK, Kind.DECODE):
            return (self.slot,)
        return self.slots

    @property
    def writes(self) -> int:
        """Return the slot that the step fills; -1 for none."""
        return self.slot if self.kind in (Kind.ENCODE, Kind.RECV, Kind.SUM_ENCODE, Kind.SIZES) else -1

    @property
    def memory_edges(self) -> set[int]:
        """Return the first and the last block of error-feedback memory that it corrects; empty if there is none."""
        if self.memory < 0 or self.kind is Kind.DECODE:
            return set()
        return {self.memory // MEMORY_BLOCK, (self.memory + self.count - 1) // MEMORY_BLOCK}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of one rank in an operation.

    Attributes:
        operation, topology, rank: operation, hosts and rank that it was built for.
        steps: steps in an order that respects their dependencies; of ready steps, the first goes first.
        slots: slots for messages.
        scratch: number of elements of the buffer SCRATCH.
        channels: number of channels that sends and receives use.
    """

    operation: Operation
    topology: Topology
    rank: int
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    scratch: int
    channels: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.topology.hosts)

    @property
    def regions(self) -> int:
        """Return the number of regions whose owners its cut finds; 0 if it has no cut."""
        return next((step.count for step in self.steps if step.kind is Kind.CUT), 0)

    def packed(self) -> tuple[array[int], array[int], array[int]]:
        """Pack the schedule for the engine: rows of integers for steps and for slots, and the lists that steps name."""
        steps, lists = array("q"), array("q")
        for s in self.steps:
            where = [len(lists), len(s.slots), len(lists) + len(s.slots), len(s.after)]
            lists.extend((*s.slots, *s.after))
            span = (-1, 0) if s.span is None else (s.span.buffer, s.span.start)
            out = (-1, 0) if s.out is None else (s.out.buffer, s.out.start)
            steps.extend(
                (s.kind, s.slot, s.peer, s.channel, s.count, *span, *out, s.divide, s.memory, *where)
            )
            steps.extend((s.region, s.owner))
        slots = array("q")
        for slot in self.slots:
            slots.extend((slot.count, slot.wide, 2 if slot.sizes else slot.plain))
        return steps, slots, lists


#: Elements of error-feedback memory that are stored together, in 8 bits: a step that corrects a part of them rounds all
#: of them again, so that the order of such steps shows in the memory's bits.
MEMORY_BLOCK = 128

#: Integers of a step in :meth:`Schedule.packed`.
STEP_WORDS = 17


def spans(buffer: Buffer, cuts: Sequence[slice]) -> list[Span]:
    """Return slices of a buffer as spans."""
    return [Span(buffer, cut.start, cut.stop - cut.start) for cut in cuts]
