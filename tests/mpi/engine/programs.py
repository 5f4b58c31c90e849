"""Operations of random programs: what each rank gives, starts, and should get."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.schedules.registry import ALGORITHMS

LARGEST = 8  # largest value: sums of a few ranks are exact in every dtype
# Elements of a lossy sum are off by at most this share of the ranks' largest values; None: elements are not bounded.
CODECS: dict[str, float | None] = {
    "none": 0,
    "lossless": 0,
    "mpc": 0,
    "exponent": 0,
    "fp16": 0,
    "bf16": 0,
    "int8": 1 / 127,
    "int4:block=64": 1 / 7,
    "int8:block=32:rounding=stochastic": 2 / 127,
    "topk:ratio=0.3": 2,
    "lattice": None,
    "powersgd:rank=2": None,
}
FOLDS = {
    "sum": (MPI.SUM, np.add),
    "avg": ("avg", np.add),
    "max": (MPI.MAX, np.maximum),
    "min": (MPI.MIN, np.minimum),
}


@dataclass
class Group:
    """A communicator under test.

    Attributes:
        name: name of the group, with that of this rank's part, if it is one of several.
        comm: communicator on this rank; None if it is not a member.
        world: the members' global ranks, in the communicator's order.
    """

    name: str
    comm: hc.Communicator | None
    world: list[int]


@dataclass
class Draw:
    """Draws of hypothesis for one operation; alike on all ranks."""

    op: str
    n: int
    dtype: str
    codec: str | None
    fold: str
    place: str
    root: int
    way: int
    name: str | None
    seed: int


@dataclass
class Flight:
    """An operation that was started, and the check to make once its requests are done."""

    what: str
    requests: list[Any]
    check: Callable[[], str]
    alike: tuple[str, np.ndarray] | None = None
    problems: list[str] = field(default_factory=list)

    def digest(self) -> tuple[str, int] | None:
        """Return a digest that all members of a group must have alike, if any."""
        return None if self.alike is None else (self.alike[0], zlib.crc32(self.alike[1].tobytes()))


def values(d: Draw, rank: int, n: int) -> np.ndarray:
    """Return small whole numbers of a rank of the world."""
    low = 0 if d.dtype.startswith("u") else -LARGEST
    return np.random.default_rng([d.seed, rank, n]).integers(low, LARGEST + 1, n).astype(d.dtype)


def start(d: Draw, group: Group, number: int) -> Flight | None:
    """Start one operation on this rank; None if it is not a member of the group."""
    if group.comm is None:
        return None
    return _Start(d, group, number).run()


class _Start:
    def __init__(self, d: Draw, group: Group, number: int) -> None:
        assert group.comm is not None
        self.d, self.comm, self.number = d, group.comm, number
        self.world = group.world
        self.p, self.me = self.comm.size, self.comm.rank
        self.root = d.root % self.p
        self.given = lambda n: [values(d, w, n) for w in group.world]
        codec = d.codec
        if (
            codec is not None
            and not np.issubdtype(np.dtype(d.dtype), np.floating)
            and not hc.get_codec(codec).lossless
        ):
            codec = None
        if (
            codec is not None
            and hc.get_codec(codec).linear
            and (d.op != "all_reduce" or d.fold not in ("sum", "avg"))
        ):
            codec = "int8"
        self.codec = codec
        self.ours: dict[str, Any] = {"codec": codec, "name": d.name}
        self.where = f"{number}: {d.op} on {group.name}, {d.n} {d.dtype} by {codec}, {d.fold}, {d.place}"
        self.key = f"{number} {group.name}"
        self.encodings = 1  # more where an algorithm encodes sums of sums again

    def run(self) -> Flight:
        run: Callable[[], Flight] = getattr(self, self.d.op)
        return run()

    def flight(
        self, requests: list[Any], got: np.ndarray, want: np.ndarray, terms: int, alike: bool = True
    ) -> Flight:
        return Flight(
            self.where,
            requests,
            lambda: self._compare(got, want, terms),
            (self.key, got) if alike else None,
        )

    def _compare(self, got: np.ndarray, want: np.ndarray, terms: int) -> str:
        """Return what is wrong with a result of values of ``terms`` ranks; empty if nothing is."""
        codec = self.codec or self.comm.policy.name
        exact = not np.issubdtype(got.dtype, np.floating) or terms == 0
        share = CODECS.get(codec) if codec in CODECS else 2
        if exact or self.p == 1:
            share = 0
        if self.d.fold == "avg" and terms and share == 0:
            share = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}.get(self.d.dtype, 0)
            share = max(share, 8e-3 if codec == "bf16" else 2e-3 if codec == "fp16" else 0)
        if got.shape != want.shape or not np.all(np.isfinite(got.astype(np.float64))):
            return f"{got.shape} for {want.shape}, or not finite"
        if share is None:
            return ""
        off = float(np.max(np.abs(got.astype(np.float64) - want.astype(np.float64)), initial=0.0))
        allowed = share * LARGEST * max(terms, 1) * 1.01 * self.encodings
        return "" if off <= allowed else f"off by {off}, allowed is {allowed}"

    def algorithm(self, op: str) -> str | None:
        """Return an algorithm that can be used if the call says the codec."""
        if self.codec is None or self.p == 1:
            return None
        codec = hc.get_codec(self.codec)
        able = [a for a in ALGORITHMS[op].values() if refusal(a, self.comm.session.topology, codec) is None]
        chosen = [None, *able][self.d.way % (len(able) + 1)]
        if chosen is None:
            return None
        self.where += f", {chosen.name}"
        self.encodings = self.p.bit_length() + 1 if chosen.reencodes else 1
        return chosen.name

    def buffers(self, mine: np.ndarray, into: int) -> tuple[Any, np.ndarray]:
        """Return a send and a receive buffer of one memory or two."""
        if self.d.place == "overlapping":
            memory = np.zeros(max(mine.size, into) + 5, mine.dtype)
            memory[5 : 5 + mine.size] = mine
            return memory[5 : 5 + mine.size], memory[:into]
        return mine, np.zeros(into, mine.dtype)

    # -- operations ----------------------------------------------------------------------------------

    def all_reduce(self) -> Flight:
        d, n = self.d, self.d.n
        if self.codec is not None and "powersgd" in self.codec:
            n = max(n // 16, 4) * 16
        op, fold = FOLDS[d.fold]
        given = self.given(n)
        want = fold.reduce(given, axis=0, dtype=None if d.fold in ("max", "min") else given[0].dtype)
        if d.fold == "avg":
            if not np.issubdtype(want.dtype, np.floating):
                op = MPI.SUM
            else:
                want = (want.astype(np.float64) / self.p).astype(want.dtype)
        send, recv = self.buffers(given[self.me], n)
        if d.place == "in place":
            send, recv = MPI.IN_PLACE, given[self.me]
        if self.codec is not None and "powersgd" in self.codec:
            send = send if d.place == "in place" else send.reshape(-1, 16)
            shaped = recv.reshape(-1, 16)
        else:
            shaped = recv
        request = self.comm.Iallreduce(send, shaped, op, algorithm=self.algorithm_of_sum(), **self.ours)
        return self.flight([request], recv, want, self.p)

    def algorithm_of_sum(self) -> str | None:
        linear = self.codec is not None and hc.get_codec(self.codec).linear
        return None if linear or self.d.fold in ("max", "min") else self.algorithm("all_reduce")

    def reduce_scatter(self) -> Flight:
        d, n = self.d, self.d.n
        op, fold = FOLDS[d.fold]
        given = self.given(n * self.p)
        want = fold.reduce(given, axis=0, dtype=None if d.fold in ("max", "min") else given[0].dtype)
        if d.fold == "avg":
            if not np.issubdtype(want.dtype, np.floating):
                op = MPI.SUM
            else:
                want = (want.astype(np.float64) / self.p).astype(want.dtype)
        want = want[self.me * n : (self.me + 1) * n]
        way = None if d.fold in ("max", "min") else self.algorithm("reduce_scatter")
        if d.place == "in place":
            memory = given[self.me]
            request = self.comm.Ireduce_scatter_block(MPI.IN_PLACE, memory, op, algorithm=way, **self.ours)
            return self.flight([request], memory[:n], want, self.p, alike=False)
        send, recv = self.buffers(given[self.me], n)
        request = self.comm.Ireduce_scatter_block(send, recv, op, algorithm=way, **self.ours)
        return self.flight([request], recv, want, self.p, alike=False)

    def all_gather(self) -> Flight:
        d, n = self.d, self.d.n
        given = self.given(n)
        send, recv = self.buffers(given[self.me], n * self.p)
        if d.place == "in place":
            recv[self.me * n : (self.me + 1) * n] = given[self.me]
            send = MPI.IN_PLACE
        request = self.comm.Iallgather(send, recv, algorithm=self.algorithm("all_gather"), **self.ours)
        return self.flight([request], recv, np.concatenate(given), 1)

    def all_to_all(self) -> Flight:
        d, n = self.d, self.d.n
        given = self.given(n * self.p)
        want = np.concatenate([g[self.me * n : (self.me + 1) * n] for g in given])
        send, recv = self.buffers(given[self.me], n * self.p)
        if d.place == "in place":
            send, recv = MPI.IN_PLACE, given[self.me]
        return self.flight([self.comm.Ialltoall(send, recv, **self.ours)], recv, want, 1, alike=False)

    def all_to_all_v(self) -> Flight:
        d, p, me = self.d, self.p, self.me
        counts = [
            [(d.n + 7 * r + 13 * q + d.seed) % (d.n + 1) * ((r + q + d.seed) % 4 != 0) for q in range(p)]
            for r in range(p)
        ]
        given = [values(d, w, sum(counts[r])) for r, w in enumerate(self.world)]
        starts = [sum(counts[r][:me]) for r in range(p)]
        want = np.concatenate([given[r][starts[r] : starts[r] + counts[r][me]] for r in range(p)])
        recv = np.zeros(want.size, want.dtype)
        into = [counts[r][me] for r in range(p)]
        request = self.comm.Ialltoallv([given[me], counts[me]], [recv, into], **self.ours)
        return self.flight([request], recv, want, 1, alike=False)

    def broadcast(self) -> Flight:
        given = self.given(self.d.n)
        buf = given[self.me]
        want = given[self.root].copy()
        request = self.comm.Ibcast(buf, self.root, algorithm=self.algorithm("broadcast"), **self.ours)
        return self.flight([request], buf, want, 1)

    def reduce(self) -> Flight:
        self.d.fold = "sum" if self.d.fold == "avg" else self.d.fold
        op, fold = FOLDS[self.d.fold]
        given = self.given(self.d.n)
        want = fold.reduce(given, axis=0, dtype=None if self.d.fold in ("max", "min") else given[0].dtype)
        at_root = self.me == self.root
        recv = np.zeros(self.d.n, want.dtype)
        way = None if self.d.fold in ("max", "min") else self.algorithm("reduce")
        into = recv if at_root else None
        request = self.comm.Ireduce(given[self.me], into, op, self.root, algorithm=way, **self.ours)
        return self.flight([request], recv, want if at_root else recv, self.p, alike=False)

    def gather(self) -> Flight:
        given = self.given(self.d.n)
        want = np.concatenate(given)
        recv = np.zeros(want.size, want.dtype)
        at_root = self.me == self.root
        request = self.comm.Igather(given[self.me], recv if at_root else None, self.root, **self.ours)
        return self.flight([request], recv, want if at_root else recv, 1, alike=False)

    def scatter(self) -> Flight:
        n = self.d.n
        whole = self.given(n * self.p)[self.root]
        recv = np.zeros(n, whole.dtype)
        send = whole if self.me == self.root else None
        request = self.comm.Iscatter(send, recv, self.root, **self.ours)
        return self.flight([request], recv, whole[self.me * n : (self.me + 1) * n], 1, alike=False)

    def barrier(self) -> Flight:
        return Flight(self.where, [self.comm.Ibarrier()], str)

    def shift(self) -> Flight:
        """Everyone sends to the rank ``root`` places on; receives are posted first or last, as each rank likes."""
        d, p, me = self.d, self.p, self.me
        given = self.given(d.n)
        to, source = (me + d.root) % p, (me - d.root) % p
        recv = np.zeros(d.n + 3, given[0].dtype)
        framed = {"codec": self.codec}
        tag = self.number % 1000
        if np.random.default_rng([d.seed, me]).integers(2):
            requests = [
                self.comm.Irecv(recv, source, tag, **framed),
                self.comm.Isend(given[me], to, tag, **framed),
            ]
        else:
            requests = [
                self.comm.Isend(given[me], to, tag, **framed),
                self.comm.Irecv(recv, source, tag, **framed),
            ]
        return self.flight(requests, recv[: d.n], given[source], 1, alike=False)
