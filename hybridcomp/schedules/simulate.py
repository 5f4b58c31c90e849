"""Simulate the schedules of all ranks: the begin and end of each step, on machines whose cores and links are shared.

*   Each rank does one step at a time: of the ready steps, the first of the schedule. It takes a core for that, which
    ranks may share: an idle rank gives its core to another, and so does a rank whose quantum is over.
*   A message leaves when its send has had its seconds of a core and its receive has begun; a short one does not wait
    for its receive. Ranks of a host share its ports to other hosts, one for each direction. Messages in a port share
    its rate evenly, at every moment. Messages between ranks of a host do not share a rate.
*   A port of an idle link saves up bytes, up to its burst, that it lets pass at once, as a token bucket does.
*   A send ends when its message has left. A receive ends when the message has arrived and has had its seconds of a
    core; a waiting rank needs some time to notice the message.

kernels/model/simulator.cpp runs the events.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridcomp.native import kernels
from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.schedule import STEP_WORDS, Kind, Schedule, Slot

_COMPUTE, _SEND, _RECV = 0, 1, 2
_INFINITE = 1e30  # bytes per second
_OUT, _IN = 0, 1

Integers = NDArray[np.int64]
Narrow = NDArray[np.int32]  # as compiled code takes them
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Link:
    """Link on which messages are sent.

    Attributes:
        latency: seconds that a message of no bytes takes.
        rate: bytes per second; infinite by default.
        burst: bytes that it lets pass at once after a rest.
        incoming: bytes per second that enter a host; None for ``rate``, with its burst.
    """

    latency: float
    rate: float = math.inf
    burst: float = 0.0
    incoming: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine that ranks run on.

    Attributes:
        network: link between hosts.
        host: link between ranks of a host.
        cores: number of cores that all ranks of all hosts share; None for one core for each rank.
        eager: bytes of the longest message that does not wait for its receive.
        quantum: seconds after which a rank gives its core to another that waits for one.
        start: seconds of a core before a rank's first step.
        look: seconds of a core that a waiting rank takes to look for messages; then it gives the core to others.
        patience: seconds for which a waiting rank looks before it sleeps.
        wake: seconds until a sleeping rank has noticed a message.
    """

    network: Link
    host: Link = Link(1e-6, 10e9)
    cores: int | None = None
    eager: float = 0.0
    quantum: float = 3e-3
    start: float = 0.0
    look: float = 0.0
    patience: float = 0.0
    wake: float = 0.0


@dataclass(frozen=True, slots=True)
class Columns:
    """Steps of all simulated ranks, rank after rank, as arrays of one number for each step.

    Attributes:
        rank: rank of the step, counted from the first that is simulated.
        kind: number of its :class:`~hybridcomp.schedules.schedule.Kind`.
        count: number of elements.
        nbytes: bytes of a message that is sent, received, checked, encoded or decoded.
        reads: number of messages that it sums.
        span, out: whether it reads or writes elements of a buffer.
        plain: whether its messages are elements as they are.
        near: whether it is a step of one rank, or a send or receive between ranks of a host.
        line, ports, edges, after: as in kernels/model/simulator.hpp.
        ranks: number of simulated ranks.
        hosts: number of simulated hosts.
    """

    rank: Narrow
    kind: Integers
    count: Integers
    nbytes: Floats
    reads: Integers
    span: NDArray[np.bool_]
    out: NDArray[np.bool_]
    plain: NDArray[np.bool_]
    near: NDArray[np.bool_]
    line: Narrow
    ports: tuple[Narrow, Narrow]
    edges: Narrow
    after: Narrow
    ranks: int
    hosts: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times in seconds at which steps begin and end, by rank and step.

    Attributes:
        begins, ends: times of each step; a send begins when its message begins to leave, a receive ends when its
            message has been taken.
        busy: seconds of a core that each rank needs.
        credits: bytes that each port has saved up at the end.
    """

    begins: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...] = ()
    credits: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the time at which the last step ends."""
        return max((end for rank in self.ends for end in rank), default=0.0)


Work = Callable[[Columns], Floats]


def by_rate(rate: float = 4e9, overhead: float = 1e-6, itemsize: int = 4) -> Work:
    """Return a function for the seconds of computing steps: an overhead, and passes over the elements at a rate.

    Args:
        rate: bytes per second of elements that are encoded, decoded or added.
        overhead: seconds of a step beside its passes.
        itemsize: bytes of an element.
    """

    def work(c: Columns) -> Floats:
        summed = (c.kind == Kind.SUM) | (c.kind == Kind.SUM_ENCODE)
        passes = np.where(summed, c.reads, 1.0)
        passes = (
            passes
            + np.where(c.kind == Kind.SUM, c.span, 0)
            + np.where(c.kind == Kind.SUM_ENCODE, 1 + c.out, 0)
        )
        idle = np.isin(c.kind, (Kind.SEND, Kind.RECV))
        passes[np.isin(c.kind, (Kind.CHECK, Kind.SIZES, Kind.CUT))] = 0
        return np.where(idle, 0.0, overhead + passes * c.count * itemsize / rate)

    return work


def simulate(
    schedules: Sequence[Schedule],
    machine: Machine,
    message_bytes: Callable[[Slot, int], int],
    work: Work | None = None,
) -> Timeline:
    """Run the schedules of all ranks in simulated time.

    Args:
        schedules: schedules of rank 0, of rank 1, ...
        machine: machine that the ranks run on.
        message_bytes: function of a slot and a number of elements that returns the bytes of such a message.
        work: function that returns the seconds of a core that each step takes; :func:`by_rate` by default.

    Raises:
        ScheduleError: messages do not meet, or steps wait for one another.
    """
    itemsize = schedules[0].operation.itemsize if schedules else 4
    return run(columns(schedules, message_bytes), machine, work or by_rate(itemsize=itemsize))


def columns(
    schedules: Sequence[Schedule], message_bytes: Callable[[Slot, int], int], *, alike: bool = False
) -> Columns:
    """Return the steps of schedules as arrays.

    Args:
        schedules: schedules of rank 0, of rank 1, ...; where hosts are alike, of the ranks of the first host alone.
        message_bytes: function of a slot and a number of elements that returns the bytes of such a message.
        alike: whether every host's ranks do the same as the first host's, turned round by hosts of equally many ranks.
            Then the first host is simulated with messages to and from itself in the place of its neighbours'.

    Raises:
        ScheduleError: messages do not meet.
    """
    packed = [schedule.packed() for schedule in schedules]
    rows = np.concatenate([np.frombuffer(s, np.int64).reshape(-1, STEP_WORDS) for s, _, _ in packed])
    sizes = [len(schedule.steps) for schedule in schedules]
    rank = np.repeat(np.arange(len(schedules)), sizes)
    kind, slot, peer, count = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4]
    hosts = np.array(schedules[0].topology.hosts)
    travels = (kind == Kind.SEND) | (kind == Kind.RECV)
    peer = np.where(travels, peer, rank)
    line = _lines(kind, rank, peer, rows[:, 3], hosts, len(schedules) if alike else 0)
    near = hosts[rank] == hosts[peer]
    far = travels & ~near
    leaves, enters = np.where(kind == Kind.SEND, (hosts[rank], hosts[peer]), -1)
    if alike:
        leaves, enters = leaves * 0, enters * 0
    ports = np.where(far & (kind == Kind.SEND), (2 * leaves + _OUT, 2 * enters + _IN), -1)
    edges, after = _dependencies(rows, packed, sizes)
    return Columns(
        rank=rank.astype(np.int32),
        kind=kind,
        count=count,
        nbytes=_message_bytes(schedules, rank, slot, count, message_bytes),
        reads=rows[:, 12],
        span=rows[:, 5] >= 0,
        out=rows[:, 7] >= 0,
        plain=np.full(len(rows), schedules[0].operation.plain),
        near=near,
        line=line,
        ports=(ports[0].astype(np.int32), ports[1].astype(np.int32)),
        edges=edges.astype(np.int32),
        after=after.astype(np.int32),
        ranks=len(schedules),
        hosts=1 if alike else int(hosts.max()) + 1,
    )


def run(c: Columns, machine: Machine, work: Work, credits: Sequence[float] = ()) -> Timeline:
    """Run steps in simulated time.

    Args:
        c: steps to run.
        machine: machine that the ranks run on.
        work: function that returns the seconds of a core that each step takes.
        credits: bytes that ports have saved up at the start, two numbers for each host: out, in. By default none.

    Raises:
        ScheduleError: steps wait for one another.
    """
    network = machine.network
    leaving = entering = (min(network.rate, _INFINITE), network.burst, 0.0)
    if network.incoming is not None:  # bytes that one bucket has let out are not held up by another
        entering = (min(network.incoming, _INFINITE), _INFINITE, _INFINITE)
    ports = [leaving, entering] * c.hosts
    if credits:
        ports = [(rate, burst, credit) for (rate, burst, _), credit in zip(ports, credits, strict=True)]
    code = np.zeros(len(c.kind), np.int8)
    code[c.kind == Kind.SEND], code[c.kind == Kind.RECV] = _SEND, _RECV
    latency = np.where(c.near, machine.host.latency, machine.network.latency)
    begins, ends = np.empty(len(code)), np.empty(len(code))
    pool = range(c.ranks) if machine.cores is None else [0] * c.ranks
    columns = [
        c.rank,
        code,
        np.ascontiguousarray(work(c), np.float64),
        c.nbytes,
        latency,
        c.line,
        *c.ports,
        c.edges,
        c.after,
    ]
    busy, saved, stuck = kernels().simulate_steps(
        columns,
        list(pool),
        [1] * c.ranks if machine.cores is None else [machine.cores],
        ports,
        [
            min(machine.host.rate, _INFINITE),
            machine.eager,
            machine.quantum,
            machine.start,
            machine.look,
            machine.patience,
            machine.wake,
        ],
        begins,
        ends,
    )
    if stuck:
        raise ScheduleError(f"deadlock: {stuck} steps wait for one another")
    cuts = np.searchsorted(c.rank, np.arange(c.ranks + 1))
    parts = [slice(*edge) for edge in itertools.pairwise(cuts)]
    return Timeline(
        tuple(tuple(begins[p].tolist()) for p in parts),
        tuple(tuple(ends[p].tolist()) for p in parts),
        tuple(busy),
        tuple(saved),
    )


def _lines(
    kind: Integers, rank: Integers, peer: Integers, channel: Integers, hosts: Integers, local: int
) -> Narrow:
    """Number the lines of messages, each from a rank to another on a channel; where hosts are alike, by distance.

    Raises:
        ScheduleError: a line has more sends than receives, or fewer.
    """
    sends, receives = kind == Kind.SEND, kind == Kind.RECV
    source, target = np.where(receives, peer, rank), np.where(receives, rank, peer)
    ranks = len(hosts)
    if not local:
        pairs, channels = source * ranks + target, [channel]
    else:
        distance = np.where(receives, -hosts[peer], hosts[peer]) % (int(hosts.max()) + 1)
        pairs = (distance * local + source % local) * local + target % local
        # Some algorithms have a channel for each rank whose data it carries: such channels are turned round, too.
        turned = (channel - source) % ranks
        after_first = np.where(channel == 0, 0, 1 + (channel - 1 - source) % ranks)
        channels = [channel, turned, after_first]
    wide = max(int(channel.max(initial=0)), ranks) + 1
    for numbers in channels:
        key = np.where(sends | receives, pairs * wide + numbers, -1)
        _, line = np.unique(key, return_inverse=True)
        most = int(line.max(initial=0)) + 1
        out, into = np.bincount(line[sends], minlength=most), np.bincount(line[receives], minlength=most)
        wrong = np.flatnonzero(out != into).tolist()
        if not wrong:
            return line.astype(np.int32)
    at = int(np.flatnonzero((line == wrong[0]) & (sends | receives))[0])
    raise ScheduleError(
        f"rank {source[at]} sends {out[wrong[0]]} messages to rank {target[at]} on channel {channel[at]}, "
        f"which receives {into[wrong[0]]}"
    )


def _dependencies(
    rows: Integers, packed: Sequence[tuple[array[int], array[int], array[int]]], sizes: Sequence[int]
) -> tuple[Integers, Integers]:
    """Return where each step's list of the steps it waits for begins, and the lists, one after the other."""
    edges = np.concatenate([[0], np.cumsum(rows[:, 14])])
    after = []
    first = 0
    for (steps, _, lists), size in zip(packed, sizes, strict=True):
        table, names = np.frombuffer(steps, np.int64).reshape(-1, STEP_WORDS), np.frombuffer(lists, np.int64)
        starts, lengths = table[:, 13], table[:, 14]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        after.append(names[np.repeat(starts, lengths) + within] + first)
        first += size
    return edges, np.concatenate(after) if after else np.empty(0, np.int64)


def _message_bytes(
    schedules: Sequence[Schedule],
    rank: Integers,
    slot: Integers,
    count: Integers,
    message_bytes: Callable[[Slot, int], int],
) -> Floats:
    """Return the bytes of each step's message; 0 where it has none."""
    known: dict[tuple[Slot, int], int] = {}
    found = np.zeros(len(rank))
    for at in np.flatnonzero(slot >= 0).tolist():
        room, n = schedules[rank[at]].slots[slot[at]], int(count[at])
        key = (room, n)
        if key not in known:
            known[key] = message_bytes(room, n)
        found[at] = known[key]
    return found
