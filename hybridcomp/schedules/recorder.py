"""Record the steps of one rank and their dependencies; algorithms write schedules with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hybridcomp.schedules.schedule import Buffer, Kind, Operation, Schedule, Slot, Span, Step
from hybridcomp.schedules.topology import Topology

# Number of earlier steps for which a step remembers whether they must have ended. It may list a step further back
# though others of its list wait for that one, too, which costs nothing; to remember all steps would take memory by the
# square of their number.
_REACH = 4096
_WITHIN_REACH = (1 << _REACH) - 1


class Recorder:
    """Recorder of the steps of one rank, which finds the dependencies of each.

    Attributes:
        operation, topology, rank: operation, hosts and rank that the schedule is for.
        ranks: number of ranks.
        others: other ranks, beginning after this one, so that not all of them send to rank 0 first.
    """

    def __init__(self, operation: Operation, topology: Topology, rank: int) -> None:
        self.operation = operation
        self.topology = topology
        self.rank = rank
        self.ranks = len(topology.hosts)
        self.others = [(rank + i) % self.ranks for i in range(1, self.ranks)]
        self._steps: list[Step] = []
        self._before: list[int] = []  # for each step, those of the last _REACH before it that must have ended
        self._slots: list[Slot] = []
        self._scratch = 0
        self._channels = 0
        self._cut = -1  # the step that finds the owners of regions
        self._condition = (-1, -1)  # region and owner for the steps that are recorded
        # For each slot, the step that wrote it last; or several steps of which only one is ever carried out.
        self._writers: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}  # for each slot, the steps that read it since
        self._checks: dict[int, int] = {}  # for each slot, the step that checked its message
        self._edges: dict[
            int, int
        ] = {}  # for each block of the memory at an edge, the step that corrected it last
        self._touched: dict[Buffer, list[tuple[int, int, int, bool]]] = {b: [] for b in Buffer}

    # -- room ----------------------------------------------------------------------------------------

    def slot(self, count: int, *, wide: bool = False, plain: bool | None = None, sizes: bool = False) -> int:
        """Make a slot for messages of at most ``count`` elements, or sizes; ``plain`` is the operation's by default."""
        plain = (self.operation.plain if plain is None else plain) and not sizes
        self._slots.append(Slot(count, wide, plain, sizes))
        return len(self._slots) - 1

    def scratch(self, count: int) -> Span:
        """Make room for ``count`` elements of the accumulator's dtype."""
        self._scratch += count
        return Span(Buffer.SCRATCH, self._scratch - count, count)

    # -- steps ---------------------------------------------------------------------------------------

    def encode(self, slot: int, span: Span, *, memory: int = -1) -> None:
        """Encode ``span`` into ``slot``."""
        self._add(Step(Kind.ENCODE, slot=slot, count=span.count, span=span, memory=memory))

    def send(self, slot: int, peer: int, channel: int = 0) -> None:
        """Send the message that was put last into ``slot``."""
        count = self._steps[self._writers[slot][-1]].count
        self._add(Step(Kind.SEND, slot=slot, peer=peer, channel=channel, count=count))

    def recv(self, slot: int, count: int, peer: int, channel: int = 0) -> None:
        """Receive ``count`` elements into ``slot``."""
        self._add(Step(Kind.RECV, slot=slot, peer=peer, channel=channel, count=count))

    def check(self, slot: int) -> None:
        """Check the message in ``slot``."""
        self._add(Step(Kind.CHECK, slot=slot, count=self._steps[self._writers[slot][-1]].count))

    def decode(self, slot: int, out: Span, *, memory: int = -1) -> None:
        """Write the values of the message in ``slot`` to ``out``."""
        self._add(Step(Kind.DECODE, slot=slot, count=out.count, out=out, memory=memory))

    def sum(
        self,
        slots: Iterable[int],
        own: Span | None,
        out: Span,
        *,
        divide: bool = False,
        memory: int = -1,
    ) -> None:
        """Add messages to ``own``, or to zeros, and write the sum to ``out``."""
        step = Step(
            Kind.SUM, slots=tuple(slots), count=out.count, span=own, out=out, divide=divide, memory=memory
        )
        self._add(step)

    def sum_encode(
        self,
        slots: Iterable[int],
        own: Span | None,
        slot: int,
        out: Span | None,
        *,
        divide: bool = False,
        memory: int = -1,
    ) -> None:
        """Add messages to ``own``, or to zeros, encode the sum into ``slot``, and decode the message to ``out``."""
        kind, read = Kind.SUM_ENCODE, tuple(slots)
        count = self._slots[slot].count if own is None else own.count
        step = Step(kind, slot=slot, slots=read, count=count, span=own, out=out, divide=divide, memory=memory)
        self._add(step)

    def copy(self, span: Span, out: Span) -> None:
        """Copy ``span`` to ``out``."""
        self._add(Step(Kind.COPY, count=span.count, span=span, out=out))

    def sizes(self, slots: Iterable[int], slot: int) -> None:
        """Write the sizes of messages, one message for each region, into ``slot``."""
        read = tuple(slots)
        self._add(Step(Kind.SIZES, slot=slot, slots=read, count=len(read)))

    def cut(self, slots: Iterable[int]) -> None:
        """Find the owners of regions from all ranks' sizes, in rank order."""
        read = tuple(slots)
        self._cut = len(self._steps)
        self._add(Step(Kind.CUT, slots=read, count=self._slots[read[0]].count))

    @contextmanager
    def owned(self, region: int, owner: int) -> Iterator[None]:
        """Record steps that are carried out only where the cut gives a region to an owner."""
        self._condition = region, owner
        try:
            yield
        finally:
            self._condition = -1, -1

    def finish(self) -> Schedule:
        """Return the schedule of what was recorded."""
        steps, slots = tuple(self._steps), tuple(self._slots)
        return Schedule(self.operation, self.topology, self.rank, steps, slots, self._scratch, self._channels)

    # -- dependencies --------------------------------------------------------------------------------

    def _add(self, step: Step) -> None:
        index = len(self._steps)
        # No other code has seen the frozen step yet; to make another one takes as long as the rest.
        object.__setattr__(step, "region", self._condition[0])
        object.__setattr__(step, "owner", self._condition[1])
        needed = self._slot_hazards(step, index) | self._span_hazards(step, index)
        if step.region >= 0:
            needed = {one for one in needed if not step.excludes(self._steps[one])} | {self._cut}
        after, before = self._reduced(needed, index)
        self._before.append(before & _WITHIN_REACH)
        if step.kind in (Kind.SEND, Kind.RECV):
            self._channels = max(self._channels, step.channel + 1)
        object.__setattr__(step, "after", after)
        self._steps.append(step)

    def _slot_hazards(self, step: Step, index: int) -> set[int]:
        needed = set()
        for slot in step.reads:
            needed.update(self._writers[slot])
            self._readers.setdefault(slot, []).append(index)
        slot = step.slot
        if step.kind is Kind.CHECK:
            self._checks[slot] = index
        elif step.kind is Kind.SEND and slot in self._checks:
            needed.add(self._checks[slot])
        slot = step.writes
        if slot >= 0:
            self._checks.pop(slot, None)
            writers = self._writers.get(slot, [])
            if writers and all(step.excludes(self._steps[one]) for one in writers):
                writers.append(index)
            else:
                needed.update(self._readers.get(slot) or writers)
                self._writers[slot] = [index]
                self._readers[slot] = []
        return needed

    def _span_hazards(self, step: Step, index: int) -> set[int]:
        needed = set()
        for span, writes in ((step.span, False), (step.out, True)):
            if span is None or not span.count:
                continue
            touched = self._touched[span.buffer]
            for start, stop, other, wrote in touched:
                if other != index and start < span.stop and span.start < stop and (writes or wrote):
                    needed.add(other)
            if writes:  # steps on elements within it are ordered through this step from now on
                touched[:] = [
                    t
                    for t in touched
                    if not (span.start <= t[0] and t[1] <= span.stop)
                    or (t[2] != index and step.excludes(self._steps[t[2]]))
                ]
            touched.append((span.start, span.stop, index, writes))
        for block in step.memory_edges:
            if block in self._edges:
                needed.add(self._edges[block])
            self._edges[block] = index
        return needed

    def _reduced(self, needed: set[int], index: int) -> tuple[tuple[int, ...], int]:
        """Remove the steps that others of ``needed`` wait for anyway.

        Returns:
            The steps left, and all steps that must have ended: a set of bits, whose first is the step before this one.
        """
        kept: list[int] = []
        covered = 0
        for one in sorted(needed, reverse=True):
            back = index - 1 - one
            if not covered >> back & 1:
                kept.append(one)
                covered |= (self._before[one] << 1 | 1) << back
        return tuple(reversed(kept)), covered
