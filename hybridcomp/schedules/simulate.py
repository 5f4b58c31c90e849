"""Simulate the schedules of all ranks: when each step begins and ends, by a simple model of machines.

*   Each rank has one processor, which does one step at a time: of those that are ready, the first of the schedule. A
    step takes an overhead, and the bytes of the elements that pass through it over a rate.
*   A message begins to leave when its send and its receive have begun. It passes through two ports in turn: the
    sender's, and ``latency`` later the receiver's. A port takes one message at a time, in the order in which they come,
    for the message's bytes over the link's rate. Ranks of a host share its ports to other hosts; between themselves
    each has ports of its own.
*   A send ends when the message has left, a receive when it has arrived.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridcomp.schedules.proofs.order import Order
from hybridcomp.schedules.schedule import Kind, Schedule, Slot, Step

_Port = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Link:
    """A link on which messages are sent.

    Attributes:
        latency: seconds that a message of no bytes takes.
        rate: bytes per second; infinite unless given.
    """

    latency: float
    rate: float = math.inf


@dataclass(frozen=True, slots=True)
class Machine:
    """The performance of the machine that ranks run on.

    Attributes:
        network: between hosts.
        host: between ranks of a host.
        compute: bytes of elements per second that a step encodes, decodes or adds.
        overhead: seconds of each such step.
    """

    network: Link
    host: Link = Link(1e-6, 10e9)
    compute: float = 4e9
    overhead: float = 1e-6


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times at which steps begin and end, in seconds; by rank and step.

    Attributes:
        begins, ends: a send is from when its message begins to leave, a receive from when it begins to arrive.
    """

    begins: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """Return the time at which the last step ends."""
        return max((end for rank in self.ends for end in rank), default=0.0)


def simulate(
    schedules: Sequence[Schedule], machine: Machine, message_bytes: Callable[[Slot, int], int]
) -> Timeline:
    """Run the schedules of all ranks in simulated time.

    Args:
        schedules: of rank 0, of rank 1, ...
        machine: what they run on.
        message_bytes: of a message of as many elements in a slot.

    Raises:
        ScheduleError: messages do not meet, or steps wait for one another.
    """
    run = _Simulation(Order(schedules), machine, message_bytes)
    run.play()
    edges = [0]
    for schedule in schedules:
        edges.append(edges[-1] + len(schedule.steps))
    cuts = [slice(*edge) for edge in itertools.pairwise(edges)]
    return Timeline(tuple(tuple(run.begins[c]) for c in cuts), tuple(tuple(run.ends[c]) for c in cuts))


def passes(step: Step) -> int:
    """Return how often a step passes over its elements: once for each message or span that it reads or writes."""
    match step.kind:
        case Kind.SEND | Kind.RECV | Kind.CHECK | Kind.SIZES | Kind.CUT:
            return 0
        case Kind.SUM:
            return len(step.slots) + (step.span is not None)
        case Kind.SUM_ENCODE:
            return len(step.slots) + 1 + (step.out is not None)
        case _:
            return 1


class _Simulation:
    """A simulation; steps are numbered through as in :class:`~hybridcomp.schedules.proofs.order.Order`."""

    def __init__(self, order: Order, machine: Machine, message_bytes: Callable[[Slot, int], int]) -> None:
        self._order, self._machine, self._bytes = order, machine, message_bytes
        steps = order.steps
        self.begins, self.ends = [0.0] * len(steps), [0.0] * len(steps)
        self._missing = [len(step.after) for step in steps]
        self._following: list[list[int]] = [[] for _ in steps]
        self._lines: dict[
            tuple[int, int, int, Kind], list[int]
        ] = {}  # sends and receives not begun, last first
        for g, step in enumerate(steps):
            for one in order.dependencies(g):
                self._following[one].append(g)
            if step.kind in (Kind.SEND, Kind.RECV):
                self._lines.setdefault(self._line(g), []).append(g)
        for line in self._lines.values():
            line.reverse()
        self._other = {send: recv for recv, send in order.sender.items()} | order.sender
        self._posted: set[int] = set()
        self._waiting: list[list[int]] = [[] for _ in order.schedules]  # steps that need the processor
        self._busy = [False] * len(order.schedules)
        self._free: dict[_Port, float] = {}
        self._events: list[tuple[float, int]] = []  # time, and a step that ends then

    def play(self) -> None:
        """Run until all steps have ended."""
        for g, missing in enumerate(self._missing):
            if not missing:
                self._ready(g, 0.0)
        for rank in range(len(self._busy)):
            self._compute(rank, 0.0)
        while self._events:
            now, g = heapq.heappop(self._events)
            if self._order.steps[g].kind not in (Kind.SEND, Kind.RECV):
                self._busy[self._order.rank[g]] = False
            for one in self._following[g]:
                self._missing[one] -= 1
                if not self._missing[one]:
                    self._ready(one, now)
            self._compute(self._order.rank[g], now)

    def _line(self, g: int) -> tuple[int, int, int, Kind]:
        step = self._order.steps[g]
        return self._order.rank[g], step.peer, step.channel, step.kind

    def _ready(self, g: int, now: float) -> None:
        """Begin a step when its turn comes."""
        if self._order.steps[g].kind not in (Kind.SEND, Kind.RECV):
            heapq.heappush(self._waiting[self._order.rank[g]], g)
            return
        line = self._lines[self._line(g)]
        while line and not self._missing[line[-1]]:
            first = line.pop()
            self._posted.add(first)
            if self._other[first] in self._posted:
                send, recv = sorted((first, self._other[first]), key=self._is_receive)
                self._transfer(send, recv, now)

    def _is_receive(self, g: int) -> bool:
        return self._order.steps[g].kind is Kind.RECV

    def _transfer(self, send: int, recv: int, now: float) -> None:
        order = self._order
        source, target, step = order.rank[send], order.rank[recv], order.steps[send]
        hosts = order.schedules[0].topology.hosts
        near = hosts[source] == hosts[target]
        link = self._machine.host if near else self._machine.network
        leaves = ("from rank", source) if near else ("from host", hosts[source])
        enters = ("to rank", target) if near else ("to host", hosts[target])
        seconds = self._bytes(order.schedules[source].slots[step.slot], step.count) / link.rate
        self.begins[send] = max(now, self._free.get(leaves, 0.0))
        self.ends[send] = self._free[leaves] = self.begins[send] + seconds
        self.begins[recv] = max(self.begins[send] + link.latency, self._free.get(enters, 0.0))
        self.ends[recv] = self._free[enters] = self.begins[recv] + seconds
        heapq.heappush(self._events, (self.ends[send], send))
        heapq.heappush(self._events, (self.ends[recv], recv))

    def _compute(self, rank: int, now: float) -> None:
        if self._busy[rank] or not self._waiting[rank]:
            return
        g = heapq.heappop(self._waiting[rank])
        step = self._order.steps[g]
        nbytes = passes(step) * step.count * self._order.schedules[rank].operation.itemsize
        self._busy[rank] = True
        self.begins[g] = now
        self.ends[g] = now + self._machine.overhead + nbytes / self._machine.compute
        heapq.heappush(self._events, (self.ends[g], g))
