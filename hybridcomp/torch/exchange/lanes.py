"""Hand messages to the other ranks of this host over memory that they share, in place of the backend's own ways.

A backend such as gloo carries what ranks of one host send each other by TCP, at a multiple of the cost of a copy. Here
a rank's messages are made in an arena of its process (:mod:`~hybridcomp.collectives.transport.arena`), and for each
exchange it hands each other rank of its host a parcel: the places of its messages, which the receiver reads there.
"""

from __future__ import annotations

import functools
import os
import re
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hybridcomp import native, variables
from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.transport.arena import (
    FIRST_BYTES,
    Arena,
    ArenaHandle,
    arena_at,
    make_arena,
    shares_memory,
)
from hybridcomp.errors import CollectiveTimeoutError, MismatchError, RemoteError, WireError, printable
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.worker import leaving

_LOOK_SECONDS = 0.2  # between two looks at whether the processes of the others have ended
_TOLD = re.compile(r"(\d{1,10}) (\d{1,10}) (\d{1,20}) (\d{1,16}) (\d{1,16})", re.ASCII)
_MOST_WHY = 1000  # characters of an error that another rank tells
_NUMBERS = (1 << 32) - 1  # exchanges until their numbers begin anew, at 1

Parcel = list[tuple[int, ByteArray]]
"""Tags and bytes of messages."""


class ArenaPool:
    """Pool of buffers that the ranks of a host share: of the whole process, in an arena that is made once."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.blocks = native.kernels().SharedBlocks(arena.memory, FIRST_BYTES)

    def take(self, nbytes: int) -> ByteArray:
        """Return a buffer of ``nbytes`` that is not in use."""
        if not nbytes:  # NumPy's view of no bytes does not tell where it is
            return np.empty(0, np.uint8)
        start = self.blocks.take(nbytes)
        return self.arena.memory[start : start + nbytes]

    def give(self, buffer: ByteArray) -> None:
        """Return a buffer to the pool that no request uses any more; it is used again once no rank reads it."""
        self.blocks.give(buffer)


class Lanes:
    """The lanes of one rank to the other ranks of its host, in one group; one thread uses them.

    Attributes:
        ranks: the other ranks of this host, as numbered in the group.
        pool: pool of buffers whose messages need no copy.
        timeout: seconds that an exchange may take.
    """

    def __init__(self, ranks: Sequence[int], pool: ArenaPool, timeout: float) -> None:
        self._processes: dict[int, int] = {}  # descriptors of the others' processes, and their ranks
        self.ranks, self.pool, self.timeout = tuple(ranks), pool, timeout
        self._native = native.kernels().Lanes(pool.blocks, len(self.ranks))
        self._arenas: list[Arena] = []
        self._ended = select.poll()
        self._count = 0
        self._broken: BaseException | None = None

    @property
    def told(self) -> str:
        """Return what the others have to know of this rank to connect to it."""
        return " ".join(map(str, [*self.pool.arena.handle, self._native.rings]))

    def connect(self, texts: Mapping[int, str], rank: int) -> None:
        """Connect to the other ranks of this host.

        Args:
            texts: what each of them has told.
            rank: this rank.

        Raises:
            OSError: the memory of one cannot be mapped here.
            ValueError: what one has told cannot be right.
        """
        here = sorted([rank, *self.ranks])
        own = here.index(rank)
        for at, other in enumerate(self.ranks):
            fields = _TOLD.fullmatch(texts[other])
            if fields is None:
                raise ValueError(f"rank {other} told {printable(texts[other][:_MOST_WHY])!r}")
            pid, fd, token, nbytes, rings = map(int, fields.groups())
            with suppress(OSError, AttributeError):  # the system has none, or forbids it
                self._watch(os.pidfd_open(pid), other)
            arena = arena_at(ArenaHandle(pid, fd, token, nbytes))
            if arena is None:
                raise OSError(f"the memory of process {pid} cannot be mapped")
            # A rank's rings are in the order of its neighbours, which leaves itself out.
            to = own - (own > here.index(other))
            if not self._native.connect(arena.memory, rings, to, at):
                raise ValueError(f"rank {other} told {printable(texts[other])!r}")
            self._arenas.append(arena)

    def _watch(self, process: int, rank: int) -> None:
        self._processes[process] = rank
        self._ended.register(process, select.POLLIN)

    def __del__(self) -> None:
        for process in self._processes:
            os.close(process)

    def send(
        self, parcels: Mapping[int, Sequence[tuple[int, ByteArray]]], what: str, compiled: Any = None
    ) -> int:
        """Hand each of the others its messages of the next exchange, and those of ``compiled`` operations.

        Returns:
            The exchange's number.

        The bytes are read where they are, until the others have released them, if they lie in a buffer of the pool,
        which may be given back at once; others are copied.

        Raises:
            CollectiveTimeoutError: a rank has not taken earlier parcels in time.
            Exception: what an earlier exchange has failed with.
        """
        if self._broken is not None:
            raise self._broken
        self._count = 1 + self._count % _NUMBERS
        for at, rank in enumerate(self.ranks):
            messages = [(tag, data) for tag, data in parcels.get(rank, ())]
            if not self._native.send(at, self._count, messages, self.timeout, compiled, rank):
                raise CollectiveTimeoutError(
                    f"{what}: rank {rank} of this host took no message within the timeout of {self.timeout:g} s"
                )
        return self._count

    def receive(self, exchange: int, what: str, compiled: Any = None) -> dict[int, Parcel]:
        """Wait for the others' messages of an exchange; they are good until :meth:`release`.

        Args:
            exchange: its number.
            what: name of an operation in it.
            compiled: the compiled module's ``CarriedOperations``, which gets its messages; None for none.

        Raises:
            CollectiveTimeoutError: they did not come in time; names the operation and the ranks that are missing.
            RemoteError: the process of one of them has ended, or it has left for an error of its own.
            WireError: what came is no parcel.
            MismatchError: a message is not what a compiled operation expects.
        """
        began = time.monotonic()
        while not self._native.wait(exchange, min(_LOOK_SECONDS, self.timeout)):
            ended = self.ended()
            # What a process has handed over before its end is here by now.
            missing = [rank for rank in self._missing(exchange) if rank in ended]
            if missing:
                raise RemoteError(
                    f"{what}: {processes_of(missing)} of this host ended before its messages came"
                )
            if leaving.is_set():
                raise RemoteError(
                    f"{what}: given up: messages of {_ranks(self._missing(exchange))} of this host had not come when "
                    f"this process ended"
                )
            if time.monotonic() - began > self.timeout:
                raise CollectiveTimeoutError(
                    f"{what}: no messages of {_ranks(self._missing(exchange))} of this host within the timeout of "
                    f"{self.timeout:g} s"
                )
        for at, rank in enumerate(self.ranks):
            why = self._native.left(at)
            if why is not None and not self._native.here(at, exchange):
                said = printable(why.decode(errors="replace")[:_MOST_WHY])
                raise RemoteError(f"{what}: rank {rank} has left the exchange: {said}")
        return {rank: self._parcel(at, exchange, what, compiled) for at, rank in enumerate(self.ranks)}

    def ended(self, seconds: float = 0) -> list[int]:
        """Return the other ranks of this host whose processes have ended; wait for the first so many seconds."""
        return sorted(self._processes[process] for process, _ in self._ended.poll(1000 * seconds))

    def _parcel(self, at: int, exchange: int, what: str, compiled: Any) -> Parcel:
        arena = self._arenas[at]
        found = self._native.read(at, exchange, arena.start, compiled, self.ranks[at])
        if isinstance(found, str):
            raise MismatchError(f"{what}: {found}")
        if found is None:
            raise WireError(f"{what}: rank {self.ranks[at]} of this host handed over what is no parcel")
        return [(tag, arena.memory[start : start + nbytes]) for tag, start, nbytes in found]

    def _missing(self, exchange: int) -> list[int]:
        return [rank for at, rank in enumerate(self.ranks) if not self._native.here(at, exchange)]

    def release(self, exchange: int) -> None:
        """Let the others have the memory of an exchange's messages back, which are not read any more."""
        self._native.release(exchange)

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank does no more exchanges, and why.

        Later ones are refused here: the others may have begun the ones that were left out.
        """
        if self._broken is None:
            self._broken = error
            why = f"{type(error).__name__}: {error}"[:_MOST_WHY]
            for at in range(len(self.ranks)):
                self._native.leave(at, why)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def processes_of(ranks: Sequence[int]) -> str:
    """Return what an error calls the processes of ranks."""
    return f"the process{'es' * (len(ranks) > 1)} of {_ranks(ranks)}"


def own_pool() -> ArenaPool:
    """Return this process's pool, made at the first call.

    Raises:
        OSError: the system has no such memory, or the environment forbids it.
        NativeUnavailableError: the kernels are missing.
    """
    if not shares_memory():
        raise OSError(f"{variables.SHARED_MEMORY}=0 forbids it")
    return _pool_of(os.getpid())


@functools.cache
def _pool_of(pid: int) -> ArenaPool:
    """Make the pool of a process: a fork needs one of its own."""
    return ArenaPool(make_arena())


def join_host(
    topology: Topology, rank: int, timeout: float, gather: Callable[[str], list[str]]
) -> tuple[Lanes | None, str]:
    """Connect the ranks of each host by lanes. Collective.

    Args:
        topology: hosts of the ranks.
        rank: this rank.
        timeout: seconds that an exchange may take.
        gather: function that returns all ranks' texts; collective.

    Returns:
        The lanes, and "". Where a rank of this host cannot share memory with another, none of its ranks has lanes: None
        and why. Where there is no other rank on this host, None and "".
    """
    if topology.largest == 1:
        return None, ""
    others = [other for other in topology.ranks(topology.hosts[rank]) if other != rank]
    lanes, why = None, ""
    if others:
        try:
            lanes = Lanes(others, own_pool(), timeout)
        except Exception as error:
            why = _said(error)
    texts = gather("" if lanes is None else lanes.told)
    if lanes is not None:
        try:
            if all(texts[other] for other in others):
                lanes.connect({other: texts[other] for other in others}, rank)
        except Exception as error:
            why = _said(error)
    verdicts = gather(why)
    for other in sorted([rank, *others]):
        if verdicts[other]:
            said = printable(verdicts[other][:_MOST_WHY])
            return None, f"rank {other} shares no memory: {said}"
    return lanes, ""


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
