"""Replay programs: discrete events of ranks that compute, wait for each other, and share cores and links.

Each rank has a stream that computes and one for the messages of each axis. Work on processors shares the cores, if
there are fewer than ranks; messages on a host's link share the link. Between events all work goes on at constant
rates.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridcomp_lab.planner.step.programs import Compute, Key, Mark, Program, Start, Wait

_DONE = 1e-12  # seconds of work that count as none


@dataclass(frozen=True, slots=True)
class Span:
    """Activity of a rank, for pictures.

    Attributes:
        rank: rank of the activity.
        stream: ``compute``, or the axis of a message.
        name: name of the activity.
        begin, end: start and end in seconds.
    """

    rank: int
    stream: str
    name: str
    begin: float
    end: float


@dataclass
class Replayed:
    """Result of a replay.

    Attributes:
        marks: time at which the last rank ended each step.
        spans: activities of the ranks.
        waits: program, axis, start and end of each wait of a compute stream.
    """

    marks: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    waits: list[tuple[int, str, float, float]] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    """Work under way.

    ``phases`` are its remaining parts: a resource, the seconds that the part takes there alone, and the most of a core
    that it gets.
    """

    programs: tuple[int, ...]
    owner: int
    queue: str
    stream: str
    name: str
    phases: deque[tuple[str, float, float]]
    weight: int
    loads: dict[int, int]
    key: Key | None = None
    begin: float = 0.0
    left: float = 0.0
    rate: float = 1.0


class Replay:
    """Replay of programs.

    Args:
        programs: programs of the ranks.
        cores: cores that they share; None: each rank has its own.
        waiting: share of a core that a rank takes while it waits, where ranks share cores.
    """

    def __init__(self, programs: Sequence[Program], cores: float | None, waiting: float = 0.0) -> None:
        self._programs = programs
        self._cores = cores
        self._waiting_share = waiting
        self._ranks = sum(program.weight for program in programs)
        self._at = [0] * len(programs)  # index of the next instruction
        self._waiting: dict[int, tuple[Key, float]] = {}
        self._ended: set[tuple[int, Key]] = set()
        self._queues: dict[tuple[int, str], deque[_Job]] = defaultdict(deque)
        self._arrived: dict[Key, set[int]] = defaultdict(set)
        self._running: list[_Job] = []
        self._delays: list[tuple[float, int, _Job]] = []
        self._count = itertools.count()
        self._now = 0.0
        self.result = Replayed()

    def run(self) -> Replayed:
        """Run all programs to their ends.

        Raises:
            ValueError: ranks wait for each other for ever: the programs do not fit together.
        """
        for program in range(len(self._programs)):
            self._go_on(program)
        while self._running or self._delays:
            self._set_rates()
            soonest = min((job.left / job.rate for job in self._running), default=float("inf"))
            until = self._now + soonest
            if self._delays:
                until = min(until, self._delays[0][0])
            passed = until - self._now
            self._now = until
            for job in self._running:
                job.left -= passed * job.rate
            ended = [job for job in self._running if job.left <= _DONE]
            if ended:
                self._running = [job for job in self._running if job.left > _DONE]
            while self._delays and self._delays[0][0] <= self._now + _DONE:
                ended.append(heapq.heappop(self._delays)[2])
            for job in ended:
                self._next_phase(job)
        stuck = [p for p, program in enumerate(self._programs) if self._at[p] < len(program.instructions)]
        if stuck:
            raise ValueError(
                f"ranks wait for each other: {self._programs[stuck[0]].instructions[self._at[stuck[0]]]}"
            )
        return self.result

    def _set_rates(self) -> None:
        links: dict[int, int] = defaultdict(int)
        for job in self._running:
            if job.phases[0][0] == "link":
                for host, messages in job.loads.items():
                    links[host] += messages
        share = self._share()
        for job in self._running:
            kind, _, most = job.phases[0]
            if kind == "cpu":
                job.rate = min(most, share)
            else:
                # The cost is of one message on each link: messages that are alike share it, too.
                job.rate = 1.0 / max((links[host] for host in job.loads), default=1)

    def _share(self) -> float:
        """Return the part of a core for each computing rank that may use as much: all get the same."""
        if self._cores is None:
            return 1.0
        computing = sorted(
            (job.phases[0][2], job.weight) for job in self._running if job.phases[0][0] == "cpu"
        )
        left, ranks = self._cores, sum(weight for _, weight in computing)
        looking = self._waiting_share * max(0, self._ranks - ranks)
        for most, weight in computing:
            if most * (ranks + looking) > left:
                return left / (ranks + looking)
            left -= most * weight
            ranks -= weight
        return 1.0

    def _go_on(self, number: int) -> None:
        """Go on with a program until it computes or waits."""
        program = self._programs[number]
        while self._at[number] < len(program.instructions):
            instruction = program.instructions[self._at[number]]
            if isinstance(instruction, Compute):
                if instruction.seconds > 0:
                    seconds, most = instruction.seconds / program.speed, 1.0
                    if self._cores is not None:  # slow ranks then get that part of a core
                        seconds, most = instruction.seconds, program.speed
                    phases = deque([("cpu", seconds, most)])
                    job = _Job(
                        (number,), number, "compute", "compute", instruction.name, phases, program.weight, {}
                    )
                    self._begin(job)
                    return
            elif isinstance(instruction, Start):
                self._start(number, instruction)
            elif isinstance(instruction, Wait):
                if (number, instruction.key) not in self._ended:
                    self._waiting[number] = instruction.key, self._now
                    return
                self._ended.discard((number, instruction.key))
            elif isinstance(instruction, Mark):
                marks = self.result.marks
                marks[instruction.step] = max(marks.get(instruction.step, 0.0), self._now)
            self._at[number] += 1

    def _start(self, number: int, start: Start) -> None:
        program, cost = self._programs[number], start.cost
        among = start.among or (number,)
        self._arrived[start.key].add(number)
        if len(self._arrived[start.key]) < len(among):
            return
        del self._arrived[start.key]
        programs = among if start.to is None else (start.to,)
        here, there = self._most(among), self._most(programs)
        phases = deque(
            [
                ("cpu", cost.cpu, here),
                ("delay", cost.latency, 1.0),
                ("link", cost.link, 1.0),
                ("cpu", cost.receive, there),
            ]
        )
        weight = sum(self._programs[p].weight for p in among)
        loads = dict(program.loads.get(start.stream, {}))
        job = _Job(
            programs, number, start.stream, start.axis, str(start.key[0]), phases, weight, loads, start.key
        )
        queue = self._queues[number, start.stream]
        queue.append(job)
        if len(queue) == 1:
            self._begin(job)

    def _most(self, programs: Sequence[int]) -> float:
        """Return the most of a core that a message of some programs gets on each of their ranks."""
        return 1.0 if self._cores is None else min(self._programs[p].speed for p in programs)

    def _begin(self, job: _Job) -> None:
        job.begin = self._now
        self._enter(job)

    def _enter(self, job: _Job) -> None:
        """Enter the job's first remaining phase, or end the job if there is none."""
        while job.phases and job.phases[0][1] <= 0:
            job.phases.popleft()
        if not job.phases:
            self._end(job)
            return
        kind, seconds, _ = job.phases[0]
        if kind == "delay":
            heapq.heappush(self._delays, (self._now + seconds, next(self._count), job))
        else:
            job.left = seconds
            self._running.append(job)

    def _next_phase(self, job: _Job) -> None:
        job.phases.popleft()
        self._enter(job)

    def _end(self, job: _Job) -> None:
        if job.key is None:
            (number,) = job.programs
            self._span(number, job)
            self._at[number] += 1
            self._go_on(number)
            return
        self._span(job.owner, job)
        queue = self._queues[job.owner, job.queue]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        for waiter in job.programs:
            self._ended.add((waiter, job.key))
            waited = self._waiting.get(waiter)
            if waited is not None and waited[0] == job.key:
                del self._waiting[waiter]
                if self._now > waited[1]:
                    self.result.waits.append((waiter, job.stream, waited[1], self._now))
                self._go_on(waiter)

    def _span(self, number: int, job: _Job) -> None:
        rank = self._programs[number].rank
        self.result.spans.append(Span(rank, job.stream, job.name, job.begin, self._now))


def unsynchronised(programs: Sequence[Program], cores: float | None, steps: int) -> float:
    """Return the seconds of a step if no rank waited for another: the longest sum of a stream.

    Where ranks share cores, it is no less than all their work takes on those.

    Args:
        programs: programs of ``steps`` steps.
        cores: see :class:`Replay`.
        steps: number of steps in the programs.
    """
    longest, work = 0.0, 0.0
    for program in programs:
        sums: dict[str, float] = defaultdict(float)
        for instruction in program.instructions:
            if isinstance(instruction, Compute):
                sums["compute"] += instruction.seconds / program.speed
                work += program.weight * instruction.seconds  # a slow rank leaves its core to others
            elif isinstance(instruction, Start):
                cost = instruction.cost
                share = max(program.loads.get(instruction.stream, {}).values(), default=1)
                sums[instruction.axis] += cost.cpu + cost.latency + cost.link * share + cost.receive
                work += program.weight * (cost.cpu + cost.receive)
        longest = max([longest, *sums.values()])
    return max(longest, 0.0 if cores is None else work / cores) / steps
