"""All-reduce by a sparse codec in balanced parts, as Ok-Topk does.

1. Each rank encodes its data once, region by region, and tells all others how many bytes each message has.
2. All ranks cut the regions alike into one run for each rank, of about equally many bytes over all ranks.
3. The owner of a run gets the others' messages of its regions and adds them, its own too, in rank order to zeros.
4. It encodes the sum, keeps what its codec keeps of it, and sends that to all; all decode the same messages.

After Li and Hoefler, "SharedMemoryPeers-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (arXiv:2201.07598).
There the borders are found again every so many steps; here at every call, from sizes that cost each rank 4 bytes for a
region. There one threshold holds for all of the data; here the codec selects in each region, as it does in each chunk
of the other algorithms.

Where the elements sent crowd in a part of the data, as in gradients of embeddings, equal shards would leave most of the
work to one rank (:mod:`~.allreduce`). Against :mod:`~.sparse`, a rank receives about 2 (p - 1) / p messages of all of the
data, not p - 1, and the sum is encoded once more. What that loses goes to the memory of the owner, which may be another
rank's at the next call: the memories' sum is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.execution.coding import NONE
from hybridcomp.collectives.execution.data_path import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming, Sealed
from hybridcomp.schedules.shards import Shards

_REGIONS = 8  # for each rank at least, of data that has so many cache lines
_LEAST_BYTES = 1 << 12  # of a region, uncompressed
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
        region = min(carrier.chunk_bytes, max(_LEAST_BYTES, send.nbytes // (_REGIONS * t.size)))
        self.shards = Shards.fixed(send.size, 1, send.size, send.dtype.itemsize, region)
        self.mailbox = carrier.mailbox()
        self.messages: list[Sealed] = []  # this rank's, by region
        self.regions: list[list[int]] = []  # by owner
        self.parts: dict[int, list[Incoming]] = {}  # of this rank's regions
        self.arriving: dict[int, Incoming] = {}  # results of the others'

    def size(self, k: int) -> int:
        return self.shards.size(0, k)

    def encode(self) -> None:
        """Step 1."""
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
        self.regions = balanced(weights.tolist(), carrier.transport.size)

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
        """Steps 3 and 4 for a region of this rank's."""
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
        """Those of the others' ``i``-th regions."""
        return [self.arriving[k] for k in self._ith(i)]

    def gather(self, i: int) -> None:
        """The end of step 4 for the others' ``i``-th regions."""
        for k in self._ith(i):
            span = self.shards.span(0, k)
            message = self.arriving.pop(k)
            if self.memory is None:
                self.carrier.decode(message, self.recv[span], self.wide)
            else:
                self.carrier.decode_result(message, self.recv[span], self.memory, span)

    def _ith(self, i: int) -> Iterable[int]:
        return [self.regions[q][i] for q in self.others if i < len(self.regions[q])]


def balanced(weights: Sequence[int], ranks: int) -> list[list[int]]:
    """Cut regions into one run for each rank, of about equal weight: a region goes where its middle falls.

    Args:
        weights: of the regions, above 0.
        ranks: how many runs; some may be empty.
    """
    runs: list[list[int]] = [[] for _ in range(ranks)]
    total, before = sum(weights), 0
    for region, weight in enumerate(weights):
        runs[(2 * before + weight) * ranks // (2 * total)].append(region)
        before += weight
    return runs
