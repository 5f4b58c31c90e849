"""All-reduce over hosts that have several ranks: exact inside a host, compressed across.

Every rank owns a shard of the result, as in :mod:`~.allreduce`. On each other host one rank *leads* that shard: the
ranks of a host lead about equally many, so that they share the crossing.

1. Inside a host: each rank hands its part of a shard, as it is, to the shard's leader (through shared memory, where
   there is some), which adds the parts in rank order, in float32 (float64 for float64).
2. Across: leaders encode these sums and send them to the owner, who adds them in the order of the hosts.
3. The owner encodes the sum once and sends it to the leaders of the other hosts and to the ranks of its own.
4. Leaders pass that message on inside their host. Every rank decodes it: all end with the same bits.

A host's link carries what one rank's would in a direct all-reduce between the hosts, 2 (h - 1) / h of the encoded
buffer for h hosts. Error feedback corrects what leaders encode in step 2 and owners in step 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Codec, Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.execution.progress import Pending, Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.algorithms.hierarchical import Roles
from hybridcomp.schedules.shards import Shards
from hybridcomp.schedules.topology import Topology

AHEAD = 1  # chunks handed to their leaders before the first one is summed there
CROSSING = 2  # chunks sent across before the first one is summed by its owner
_BEHIND = 2  # chunks summed by their owners before the first result is decoded


def refuses(topology: Topology, codec: Codec) -> str | None:
    """Say why a hierarchical algorithm is of no use on these hosts; return None if it is of use."""
    if topology.count == 1:
        return "all ranks are on one host"
    return "each rank has a host of its own" if topology.largest == 1 else None


def hierarchical_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum ``send`` over all ranks into ``recv``.

    Args:
        carrier: codec, transport and statistics.
        send, recv: the same count and dtype; either the same memory or none in common.
        tags: four.
        mean: divide the sum by the number of ranks (before it is encoded).
        memory: error feedback of as many elements; its step has begun.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    size = carrier.transport.size
    shards = Shards.of(send.size, size, send.dtype.itemsize, carrier.chunk_bytes)
    run = _AllReduce(carrier, send, recv, tags, shards, size if mean else 1, memory)
    with carrier.transport.keeping(run):
        yield from pipelined(
            shards.count,
            Stage(AHEAD, run.hand_over),
            Stage(0, run.cross, run.parts.__getitem__),
            Stage(-CROSSING, run.reduce, run.crossed.__getitem__),
            Stage(-CROSSING - _BEHIND, run.pass_on, lambda k: [m for _, m in run.results[k]]),
            Stage(-CROSSING - _BEHIND - 1, run.take, lambda k: [m for _, m in run.passed[k]]),
            arrival=run.mailbox.arrival,
        )
        yield from run.mailbox.finish()


class Stage(NamedTuple):
    """One of the stages that every chunk passes through.

    Attributes:
        ahead: of a common count, in chunks; negative is behind it.
        work: does it for a chunk.
        needs: the messages that must be here first.
    """

    ahead: int
    work: Callable[[int], None]
    needs: Callable[[int], list[Incoming]] | None = None


def pipelined(count: int, *stages: Stage, arrival: Callable[[list[Incoming]], Pending]) -> Steps:
    """Run stages, the first one furthest ahead, for ``count`` chunks."""
    for step in range(-stages[0].ahead, count - stages[-1].ahead):
        for stage in stages:
            k = step + stage.ahead
            if 0 <= k < count:
                needed = stage.needs(k) if stage.needs is not None else []
                if needed:
                    yield arrival(needed)
                stage.work(k)


class Crossing:
    """Steps 1 and 2 of a reduction over hosts, on one rank, chunk by chunk."""

    def __init__(
        self,
        carrier: Carrier,
        send: Flat,
        tags: Sequence[int],
        shards: Shards,
        memory: Memory | None,
    ) -> None:
        self.mailbox = carrier.mailbox()
        self.carrier = carrier
        self.plain = carrier.alike(codec=NONE)
        self.wide = carrier.alike(dtype=send.dtype.accumulator)
        self.send = send.data
        self.tags = tags
        self.shards = shards
        self.memory = memory
        self.rank = carrier.transport.rank
        self.roles = Roles(carrier.transport.topology, self.rank)
        self.parts: dict[int, list[Incoming]] = {}
        self.crossed: dict[int, list[Incoming]] = {}
        self.own_parts: dict[int, list[Incoming]] = {}

    def led(self, k: int) -> list[int]:
        """Return the owners that this rank leads, whose shards have a chunk ``k``."""
        return [q for q in self.roles.led if self.shards.size(q, k)]

    def hand_over(self, k: int) -> None:
        """Do step 1 for chunk ``k`` of every shard, and post the receives for it and for step 2."""
        mailbox, shards, roles = self.mailbox, self.shards, self.roles
        self.parts[k] = [
            mailbox.receive(self.plain.inbox_bytes(shards.size(q, k)), p, self.tags[0])
            for q in self.led(k)
            for p in roles.local
        ]
        own = self.wide.inbox_bytes(shards.size(self.rank, k))
        self.crossed[k] = [
            mailbox.receive(own, p, self.tags[1]) for p in roles.peers if shards.size(self.rank, k)
        ]
        for p, led in roles.handed:
            spans = [shards.span(q, k) for q in led if shards.size(q, k)]
            for message in self.plain.encode_many([self.send[span] for span in spans]):
                mailbox.send(message, [p], self.tags[0])

    def cross(self, k: int) -> None:
        """Sum the parts of step 1 and send step 2's messages.

        The parts of this rank's own shard are kept, to be summed with those messages.
        """
        arrived = iter(self.parts.pop(k))
        for q in self.led(k):
            span = self.shards.span(q, k)
            parts = [next(arrived) for _ in self.roles.local]
            if q == self.rank:
                self.own_parts[k] = parts
                continue
            if self.memory is None:
                wide = self.wide.dtype
                message = self.carrier.sum_encode(self.send[span], [], wide, wide, 1, None, parts)
            else:
                acc = self.plain.summed(self.send[span], parts, self.plain.dtype)
                message = self.wide.encode_with_feedback(acc, self.memory, span)
                self.plain.spent(acc)
            self.mailbox.send(message, [q], self.tags[1])

    def own_sum(self, own: Any, parts: list[Incoming], span: slice) -> Any:
        """Return this host's sum of a span of this rank's shard, corrected by error feedback where there is any."""
        local = self.plain.summed(own, parts, self.plain.dtype)
        acc = self.wide.own(local, self.memory, span)
        self.plain.spent(local)
        return acc


class _AllReduce(Crossing):
    """One all-reduce on this rank."""

    def __init__(
        self,
        carrier: Carrier,
        send: Flat,
        recv: Flat,
        tags: Sequence[int],
        shards: Shards,
        ranks: int,
        memory: Memory | None,
    ) -> None:
        super().__init__(carrier, send, tags, shards, memory)
        self.recv = recv.data
        self.ranks = ranks
        exact = carrier.codec.lossless and memory is None
        self.sum_dtype = send.dtype if exact else send.dtype.accumulator
        self.results: dict[int, list[tuple[int, Incoming]]] = {}
        self.passed: dict[int, list[tuple[int, Incoming]]] = {}

    def hand_over(self, k: int) -> None:
        """Send parts to their leaders, as the base class does, and post the receives of steps 3 and 4."""
        super().hand_over(k)
        roles = self.roles
        self.results[k], self.passed[k] = [], []
        for q in range(self.carrier.transport.size):
            if q == self.rank or not self.shards.size(q, k):
                continue
            nbytes = self.carrier.inbox_bytes(self.shards.size(q, k), self.sum_dtype)
            leader = roles.leader(q)
            if leader in (q, self.rank):
                self.results[k].append((q, self.mailbox.receive(nbytes, q, self.tags[2])))
            else:
                self.passed[k].append((q, self.mailbox.receive(nbytes, leader, self.tags[3])))

    def reduce(self, k: int) -> None:
        """Do the rest of step 2, and step 3, for chunk ``k`` of this rank's shard."""
        if not self.shards.size(self.rank, k):
            return
        parts, messages = self.own_parts.pop(k), self.crossed.pop(k)
        span = self.shards.span(self.rank, k)
        own, out = self.send[span], self.recv[span]
        receivers = [*self.roles.peers, *self.roles.local]
        if self.memory is None:
            wide = self.wide.dtype
            result = self.carrier.sum_encode(own, messages, wide, self.sum_dtype, self.ranks, out, parts)
            self.mailbox.send(result, receivers, self.tags[2])
            return
        acc = self.own_sum(own, parts, span)
        self.wide.add(messages, acc)
        result = self.carrier.encode_sum_with_feedback(acc, self.memory, span, self.ranks)
        self.mailbox.send(result, receivers, self.tags[2])
        self.carrier.decode_own_result(result, out, self.memory, span)

    def pass_on(self, k: int) -> None:
        """Do step 4 for the results that come from their owners."""
        results = self.results.pop(k)
        for q, message in results:
            if self.roles.leader(q) == self.rank and self.roles.local:
                checked = self.carrier.checked(message, self.shards.size(q, k), self.sum_dtype)
                self.mailbox.forward(checked, self.roles.local, self.tags[3])
        self._decode(k, results)

    def take(self, k: int) -> None:
        """Do step 4 for the results that leaders pass on."""
        self._decode(k, self.passed.pop(k))

    def _decode(self, k: int, results: list[tuple[int, Incoming]]) -> None:
        spans = [self.shards.span(q, k) for q, _ in results]
        if self.memory is None:
            outs = [self.recv[span] for span in spans]
            self.carrier.decode_many([message for _, message in results], outs, self.sum_dtype)
            return
        for (_, message), span in zip(results, spans, strict=True):
            self.carrier.decode_result(message, self.recv[span], self.memory, span)
