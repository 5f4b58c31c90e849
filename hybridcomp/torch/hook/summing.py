"""Sum tasks over a link, round by round, as a generator of transfers: its caller chooses when to wait.

All messages that a rank has for another one travel together, one after another; each begins at a multiple of 64
bytes, and says itself how long it is. A rank on which something fails sends zeros, or nothing, which every other rank
refuses: it fails there too, instead of waiting.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from hybridcomp import trace, wire
from hybridcomp.arrays import ByteArray
from hybridcomp.errors import WireError
from hybridcomp.torch.hook.links import Link, Transfer
from hybridcomp.torch.hook.reduce_tasks import ReduceTask

ALIGN = 64  # bytes
_GRAIN = 1 << 16  # bytes: buffers of sizes near each other are the same
_SPARE = 16  # buffers of one size that are kept

Summing = Generator[Transfer, list[ByteArray], None]
Seconds = list[float]


def _pages(nbytes: int) -> ByteArray:
    return np.zeros(nbytes, np.uint8)


class Buffers:
    """A pool of buffers that are reused: fresh pages cost more than encoding.

    For one thread.

    Args:
        make: allocates so many bytes.
    """

    def __init__(self, make: Callable[[int], ByteArray] = _pages) -> None:
        self._make = make
        self._free: dict[int, list[ByteArray]] = {}

    def take(self, nbytes: int) -> ByteArray:
        """Return a buffer of at least ``nbytes``, with anything in it."""
        size = -(-nbytes // _GRAIN) * _GRAIN
        free = self._free.get(size)
        return free.pop() if free else self._make(size)

    def give(self, *buffers: ByteArray) -> None:
        """Return buffers to the pool that nobody uses any more."""
        for buffer in buffers:
            free = self._free.setdefault(buffer.size, [])
            if len(free) < _SPARE:
                free.append(buffer)


class Staging:
    """The staging of a batch's messages before and after they are packed: nothing to do for tasks in host memory."""

    def start_encode(self, tasks: Sequence[ReduceTask], ranks: Sequence[int], nbytes: int) -> Summing:
        """Start to encode, before the messages to other ranks are packed, of ``nbytes`` at most."""
        yield from ()

    def start_reduce(
        self,
        tasks: Sequence[ReduceTask],
        messages: Sequence[list[ByteArray]],
        ranks: Sequence[int],
        nbytes: int,
    ) -> Summing:
        """Start to reduce, before the messages of the sums are packed.

        ``messages`` came, of all tasks from each of ``ranks``.
        """
        yield from ()

    def start_decode(self, tasks: Sequence[ReduceTask], messages: Sequence[list[ByteArray]]) -> None:
        """Start to decode, before the results' messages are decoded."""

    def settle(self) -> Summing:
        """Wait for the started work: then packed messages can be sent, and decoded values read.

        Raises:
            WireError: a message was damaged.
        """
        yield from ()

    def drain(self) -> None:
        """Wait, after a failure, until buffers can be written."""


_NO_STAGING = Staging()


def summed(
    tasks: Sequence[ReduceTask],
    link: Link,
    buffers: Buffers,
    numbers: Iterator[int],
    parts_of: list[trace.Part] | None = None,
    staging: Staging = _NO_STAGING,
) -> Summing:
    """Sum all tasks of ``tasks`` in place, in two transfers.

    Args:
        tasks: the tasks, the same on all ranks, in memory of hosts or devices; those of a device come first.
        link: to the other ranks.
        buffers: for messages.
        numbers: of the transfers; the same on all ranks.
        parts_of: gets what was done when, for a trace.
        staging: the staging of tasks in a device's memory.

    Raises:
        WireError, MismatchError: what another rank sent is damaged, or not what this one expects.
    """
    others = [q for q in range(link.size) if q != link.rank]
    exact = all(task.exact for task in tasks)
    incoming = sum(aligned(task.room(link.rank)) for task in tasks)
    rooms = [0 if q == link.rank else incoming for q in range(link.size)]
    most = [sum(aligned(task.room(q)) for task in tasks) for q in range(link.size)]
    send, recv = buffers.take(sum(most) - most[link.rank]), buffers.take(sum(rooms))
    failed: Exception | None = None
    began = time.perf_counter()
    try:
        yield from staging.start_encode(tasks, others, send.size)
        counts = _pack_parts(tasks, send, others, link.size)
        yield from staging.settle()
    except Exception as error:
        failed = error
        staging.drain()
        counts = [most[q] if exact and q != link.rank else 0 for q in range(link.size)]
        send[: sum(counts)] = 0
    _note(parts_of, "encode", began)
    parts = yield link.scatter(next(numbers), send, counts, recv, rooms, exact=exact)

    widest = max(most)
    result, results = buffers.take(widest), buffers.take(widest * link.size)
    count = 0
    began = time.perf_counter()
    if failed is None:
        try:
            messages = [_unpack(tasks, parts[q], q, link.rank) for q in others]
            yield from staging.start_reduce(tasks, messages, others, widest)
            columns = iter(zip(*messages, strict=True))
            count = _pack(
                tasks, result, lambda task, out: task.reduce(list(next(columns)), others, out), len(others)
            )
            yield from staging.settle()
        except Exception as error:
            failed = error
            staging.drain()
    if failed is not None:
        count = most[link.rank] if exact else 0
        result[:count] = 0
    _note(parts_of, "sum", began)
    parts = yield link.gather(next(numbers), result[:widest], count, results, most, exact=exact)
    if failed is not None:
        raise failed
    began = time.perf_counter()
    messages = [_unpack(tasks, parts[q], q, q) for q in others]
    staging.start_decode(tasks, messages)
    for task, column in zip(tasks, zip(*messages, strict=True), strict=True):
        since = time.perf_counter()
        task.decode(list(column), others)
        task.seconds[1] += time.perf_counter() - since
    yield from staging.settle()
    _note(parts_of, "decode", began)
    buffers.give(send, recv, result, results)


def _note(parts: list[trace.Part] | None, name: str, began: float) -> None:
    if parts is not None:
        parts.append((name, began, time.perf_counter()))


def _pack_parts(tasks: Sequence[ReduceTask], out: ByteArray, ranks: Sequence[int], size: int) -> list[int]:
    """Write the messages to each of ``ranks``; return the bytes that go to each of all."""
    counts, at = [0] * size, 0
    for q in ranks:
        counts[q] = _pack(tasks, out[at:], functools.partial(_encode, q))
        at += counts[q]
    return counts


def _encode(shard: int, task: ReduceTask, out: ByteArray) -> int:
    return task.encode(shard, out)


def _pack(
    tasks: Sequence[ReduceTask],
    out: ByteArray,
    write: Callable[[ReduceTask, ByteArray], int],
    receivers: int = 1,
) -> int:
    """Write a message of each task; return the bytes of all."""
    at = 0
    for task in tasks:
        began = time.perf_counter()
        nbytes = write(task, out[at:])
        task.seconds[0] += time.perf_counter() - began
        task.sent += nbytes * receivers
        end = at + aligned(nbytes)
        out[at + nbytes : end] = 0
        at = end
    return at


def _unpack(tasks: Sequence[ReduceTask], data: ByteArray, rank: int, shard: int) -> list[ByteArray]:
    """Return the messages of a shard of each task, from ``rank``; of each, only the length has been checked."""
    found: list[ByteArray] = []
    at = 0
    for task in tasks:
        if not data[at : at + wire.HEADER_BYTES].any():
            raise WireError(
                f"rank {rank} has failed: it sent no message where {len(tasks) - len(found)} were expected"
            )
        try:
            nbytes = wire.HEADER_BYTES + wire.peek(data[at:]).payload
        except WireError as error:
            raise WireError(f"from rank {rank}: {error}") from error
        if nbytes > task.room(shard):
            raise WireError(
                f"rank {rank} sent a message of {nbytes} bytes where at most {task.room(shard)} fit"
            )
        found.append(data[at : at + nbytes])
        at += aligned(nbytes)
    return found


def aligned(nbytes: int) -> int:
    """Return the bytes that a message takes with its padding."""
    return -(-nbytes // ALIGN) * ALIGN
