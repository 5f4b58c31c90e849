"""Order the events of all ranks' schedules, and check that all of them happen.

Every step has a begin and an end. The proofs keep two relations apart, because transports differ:

*   Events that *may have to be waited for*, in any transport. A receive ends after its send began. A send may be
    synchronous, and end after its receive began; and where ranks share memory a message is read where its sender made
    it, so that a send may end only after the receiver's last reader of the message, which may be a send itself. Sends
    to a peer on a channel begin in the order of the schedule, and so do receives. If no event waits for itself here, no
    transport deadlocks, whatever the order of arrivals: every transport waits for some of these events and no others.
*   Facts that *are certain* in every transport: a step begins after the steps that it lists have ended, and a receive
    ends after its send began. (A buffered send may end before its receive begins, so nothing follows from its end
    except the sender's next steps.) Races are judged by this relation alone.

The end of a send means, in every transport, that the sender may write its slot again: a transport that lets receivers
read in place holds the end back until they have read. So a slot's races are all within its rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NoReturn

from hybridcomp.schedules.faults import ScheduleError, describe, fail
from hybridcomp.schedules.schedule import Kind, Schedule


class Order:
    """Order of all ranks' steps, which are numbered through, rank by rank.

    Attributes:
        schedules: schedules of all ranks.
        steps: steps of all ranks.
        rank: rank of each step.
        sender: for each receive, the send of its message.
        events: begins (2 * step) and ends (2 * step + 1) in an order in which they may happen.
        before: for each step, the steps that have certainly ended when it begins, as a set of bits.
        bits: for each step, the set of this step alone.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        """Put steps in order.

        Raises:
            ScheduleError: a send or receive without its other half, or steps that wait for one another.
        """
        self.schedules = schedules
        self.steps = [step for schedule in schedules for step in schedule.steps]
        self.rank = [schedule.rank for schedule in schedules for _ in schedule.steps]
        self._first = [0]
        for schedule in schedules:
            self._first.append(self._first[-1] + len(schedule.steps))
        self._lines: list[list[int]] = []
        self._sorted_dependencies()
        self.sender = self._matched()
        self.events = self._happens()
        self.bits = [1 << g for g in range(len(self.steps))]
        self.before = self._certain()

    def fail(self, step: int, problem: str) -> NoReturn:
        """Raise a ScheduleError about a step."""
        rank = self.rank[step]
        fail(self.schedules[rank], step - self._first[rank], problem)

    def name(self, step: int) -> str:
        """Name a step."""
        rank = self.rank[step]
        return f"rank {rank}, step {step - self._first[rank]} ({describe(self.steps[step])})"

    def dependencies(self, step: int) -> list[int]:
        """Return the steps that a step lists in ``after``."""
        first = self._first[self.rank[step]]
        return [first + one for one in self.steps[step].after]

    def longest_chain(self) -> int:
        """Return the number of steps in the longest chain, over all ranks, in which each waits for the one before."""
        length = [0] * len(self.steps)
        for event in self.events:
            g = event >> 1
            if event & 1 == 0:
                length[g] = 1 + max((length[one] for one in self.dependencies(g)), default=0)
            elif g in self.sender:
                length[g] = max(length[g], 1 + length[self.sender[g]])
        return max(length, default=0)

    def _sorted_dependencies(self) -> None:
        for g, step in enumerate(self.steps):
            index = g - self._first[self.rank[g]]
            if any(not 0 <= one < index for one in step.after):
                self.fail(g, f"it waits for step {max(step.after)}, which is not an earlier one")

    def _matched(self) -> dict[int, int]:
        """Find each receive's send: the n-th receive of a channel meets the n-th send."""
        lines: dict[tuple[Kind, int, int, int], list[int]] = {}
        ranks = len(self.schedules)
        for g, step in enumerate(self.steps):
            if step.kind in (Kind.SEND, Kind.RECV):
                if not 0 <= step.peer < ranks or step.peer == self.rank[g]:
                    self.fail(g, f"there is no peer {step.peer} among {ranks} ranks")
                lines.setdefault((step.kind, self.rank[g], step.peer, step.channel), []).append(g)
        self._lines = list(lines.values())
        sender: dict[int, int] = {}
        for (kind, rank, peer, channel), line in lines.items():
            other = Kind.RECV if kind is Kind.SEND else Kind.SEND
            met = lines.get((other, peer, rank, channel), [])
            if len(line) > len(met):
                what = "nobody receives" if kind is Kind.SEND else "nobody sends"
                self.fail(line[len(met)], f"{what} it: rank {peer} has {len(met)} of channel {channel}")
            if kind is Kind.RECV:
                sender.update(zip(line, met, strict=False))
        return sender

    # -- events that may have to be waited for ---------------------------------------------------------

    def _waits(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of events, except of steps of one rank, of which the second may have to wait for the first."""
        for line in self._lines:
            for g, after in itertools.pairwise(line):
                yield 2 * g, 2 * after
        readers = self._readers()
        for recv, send in self.sender.items():
            yield 2 * send, 2 * recv + 1
            yield 2 * recv, 2 * send + 1
            for reader in readers.get(recv, ()):
                yield 2 * reader + 1, 2 * send + 1

    def _readers(self) -> dict[int, list[int]]:
        """Return, for each receive, the steps that read its message before the slot is written again."""
        readers: dict[int, list[int]] = {}
        for schedule in self.schedules:
            held: dict[int, int] = {}
            for g, step in enumerate(schedule.steps, self._first[schedule.rank]):
                for slot in step.reads:
                    if slot in held:
                        readers.setdefault(held[slot], []).append(g)
                if step.kind is Kind.RECV:
                    held[step.slot] = g
                elif step.writes >= 0:
                    held.pop(step.writes, None)
        return readers

    def _happens(self) -> list[int]:
        """Run the events that can happen."""
        count = len(self.steps)
        following: list[list[int]] = [[] for _ in range(2 * count)]
        missing = [0, 1] * count
        for g, step in enumerate(self.steps):
            following[2 * g].append(2 * g + 1)
            first = self._first[self.rank[g]]
            missing[2 * g] = len(step.after)
            for one in step.after:
                following[2 * (first + one) + 1].append(2 * g)
        for cause, effect in self._waits():
            following[cause].append(effect)
            missing[effect] += 1
        events = [event for event in range(2 * count) if not missing[event]]
        for event in events:  # the list grows
            for effect in following[event]:
                missing[effect] -= 1
                if not missing[effect]:
                    events.append(effect)
        if len(events) < 2 * count:
            self._deadlock(following, set(range(2 * count)).difference(events))
        return events

    def _deadlock(self, following: list[list[int]], stuck: set[int]) -> None:
        causes: dict[int, int] = {}
        for cause in stuck:
            for effect in following[cause]:
                if effect in stuck:
                    causes[effect] = cause
        event, seen = min(stuck), []
        while event not in seen:
            seen.append(event)
            event = causes[event]
        circle = seen[seen.index(event) :]
        names = list(dict.fromkeys(self.name(one // 2) for one in circle))
        raise ScheduleError(f"deadlock: {', which waits for '.join([*names, names[0]])}")

    # -- certain facts -------------------------------------------------------------------------------

    def _certain(self) -> list[int]:
        before = [0] * len(self.steps)
        ended = [0] * len(self.steps)  # for each step, the steps that have ended at its end, it included
        sender, bits = self.sender, self.bits
        for event in self.events:
            g = event >> 1
            if event & 1:
                ended[g] = before[g] | bits[g]
                if g in sender:
                    ended[g] |= before[sender[g]]
                continue
            first, found = self._first[self.rank[g]], 0
            for one in self.steps[g].after:
                found |= ended[first + one]
            before[g] = found
        return before
