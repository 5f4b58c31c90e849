"""All-reduce by a sparse codec in balanced parts, as Ok-Topk does, where arrays may lie on a device.

:mod:`hybridcomp.schedules.algorithms.oktopk` says how it goes; by that schedule the compiled engine does the same on
arrays in host memory, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming, Sealed
from hybridcomp.schedules import cuts

_BEHIND = 2  # regions summed before the first result is decoded


def oktopk_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
) -> Steps:
    """Sum what the codec sends of ``send`` over all ranks into ``recv``.

    Args:
        carrier: a sparse codec, transport and statistics.
        send, recv: the same count and dtype; either the same memory or none in common.
        tags: one for the sizes, one for the parts, one for the results.
        mean: divide the sum by the number of ranks (before it is encoded).
        memory: error feedback of as many elements, that does not track; its step has begun.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    run = _Run(carrier, send, recv, tags, mean, memory)
    with carrier.transport.keeping(run):
        run.encode()
        yield from run.cut()
        run.scatter()
        rounds = max((len(regions) for regions in run.regions), default=0)
        for i in range(rounds + _BEHIND):
            for k in run.regions[run.rank][i : i + 1]:
                yield run.mailbox.arrival(run.parts[k])
                run.reduce(k)
            if i >= _BEHIND:
                yield run.mailbox.arrival(run.results(i - _BEHIND))
                run.gather(i - _BEHIND)
        yield from run.mailbox.finish()


class _Run:
    """One all-reduce on this rank."""

    def __init__(
        self,
        carrier: Carrier,
        send: Flat,
        recv: Flat,
        tags: Sequence[int],
        mean: bool,
        memory: Memory | None,
    ) -> None:
        t = carrier.transport
        self.carrier = carrier
        self.send, self.recv = send.data, recv.data
        self.wide = send.dtype.accumulator
        self.part_dtype = send.dtype if memory is None else self.wide
        self.tags = tags
        self.ranks = t.size if mean else 1
        self.memory = memory
        self.rank, self.others = t.rank, t.others
        self.shards = cuts.regions(send.size, t.size, send.dtype.itemsize, carrier.chunk_bytes)
        self.mailbox = carrier.mailbox()
        self.messages: list[Sealed] = []  # this rank's, by region
        self.regions: list[list[int]] = []  # by owner
        self.parts: dict[int, list[Incoming]] = {}  # of this rank's regions
        self.arriving: dict[int, Incoming] = {}  # results of the others'

    def size(self, k: int) -> int:
        return self.shards.size(0, k)

    def encode(self) -> None:
        """Do step 1: encode this rank's data."""
        for k in range(self.shards.count):
            span = self.shards.span(0, k)
            if self.memory is None:
                self.messages.append(self.carrier.encode(self.send[span]))
            else:
                self.messages.append(self.carrier.encode_with_feedback(self.send[span], self.memory, span))

    def cut(self) -> Steps:
        """Exchange the sizes of messages, and do step 2."""
        carrier, count = self.carrier, self.shards.count
        sizes = np.array([m.nbytes for m in self.messages], np.uint32)
        ledger = Carrier(carrier.transport, NONE, DType.UINT32, carrier.call)
        mailbox = ledger.mailbox()
        arriving = [mailbox.receive(ledger.inbox_bytes(count), q, self.tags[0]) for q in self.others]
        mailbox.send(ledger.encode(sizes), self.others, self.tags[0])
        with carrier.transport.keeping(mailbox):
            yield mailbox.arrival(arriving)
            weights = sizes.astype(np.uint64)
            theirs = np.empty_like(sizes)
            for message in arriving:
                ledger.decode(message, theirs)
                weights += theirs
            yield from mailbox.finish()
        self.regions = cuts.balanced(weights.tolist(), carrier.transport.size)

    def scatter(self) -> None:
        """Send parts to their owners, and post the receives of steps 3 and 4."""
        carrier, mailbox = self.carrier, self.mailbox
        for k in self.regions[self.rank]:
            nbytes = carrier.inbox_bytes(self.size(k), self.part_dtype)
            self.parts[k] = [mailbox.receive(nbytes, q, self.tags[1]) for q in sorted(self.others)]
        for q in self.others:
            for k in self.regions[q]:
                nbytes = carrier.inbox_bytes(self.size(k), self.wide)
                self.arriving[k] = mailbox.receive(nbytes, q, self.tags[2])
        for i in range(max(map(len, self.regions), default=0)):
            for q in self.others:  # in turn, so that no owner waits for all of another's
                for k in self.regions[q][i : i + 1]:
                    mailbox.send(self.messages[k], [q], self.tags[1])

    def reduce(self, k: int) -> None:
        """Do steps 3 and 4 for a region that this rank owns: sum it, encode and send the sum, decode it here."""
        carrier, memory = self.carrier, self.memory
        span = self.shards.span(0, k)
        out = self.recv[span]
        total = carrier.total(self.parts.pop(k), self.messages[k], out, self.part_dtype)
        carrier.release(self.messages[k])
        if memory is None:
            result = carrier.encode_sum(total, self.wide, self.ranks)
            self.mailbox.send(result, self.others, self.tags[2])
            carrier.decode_own(result, out, self.wide)
        else:
            result = carrier.encode_sum_with_feedback(total, memory, span, self.ranks)
            self.mailbox.send(result, self.others, self.tags[2])
            carrier.decode_own_result(result, out, memory, span)

    def results(self, i: int) -> list[Incoming]:
        """Return the messages of the results of the other ranks' ``i``-th regions."""
        return [self.arriving[k] for k in self._ith(i)]

    def gather(self, i: int) -> None:
        """Decode the results of the other ranks' ``i``-th regions, which ends step 4."""
        for k in self._ith(i):
            span = self.shards.span(0, k)
            message = self.arriving.pop(k)
            if self.memory is None:
                self.carrier.decode(message, self.recv[span], self.wide)
            else:
                self.carrier.decode_result(message, self.recv[span], self.memory, span)

    def _ith(self, i: int) -> Iterable[int]:
        return [self.regions[q][i] for q in self.others if i < len(self.regions[q])]
