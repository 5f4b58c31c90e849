"""All-reduce of floats by a codec, encoded once; and of integers as they are.

1. Each rank owns a shard. It encodes every other rank's shard of its own data and sends it there.
2. The owner adds the decoded shards to its own in rank order, in float32 (float64 for float64).
3. The owner encodes the sum and sends it to all.
4. Every rank, the owner too, decodes that message: all ranks end with the same bits.

The sum is encoded once, where a ring would encode it again at each hop and let the error grow with the square
root of the rank count. Steps overlap chunk by chunk. With error feedback what a rank encodes, in step 1 for others'
shards and in step 3 for its own, is corrected by a memory of all of its data (:mod:`.memory`):

*   ``ef`` and ``loco`` do the same in both steps; the owner's own part enters the sum as it is.
*   ``dgc``: the owner's own part too is what its memory would have sent, or momentum would weigh ranks differently;
    what step 3 loses is sent with the owner's next part.
*   ``ef21``: parts and results are differences, from estimates that their receivers hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridcomp.arrays import Flat
from hybridcomp.codecs import Memory
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming, Sealed
from hybridcomp.schedules.shards import Shards

_AHEAD = 3  # chunks sent before the first one is summed
_BEHIND = 2  # chunks summed before the first result is decoded


def allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: Sequence[int],
    *,
    mean: bool = False,
    memory: Memory | None = None,
    fold: np.ufunc | None = None,
) -> Steps:
    """Sum ``send`` over all ranks into ``recv``.

    Args:
        carrier: codec, transport and statistics.
        send, recv: the same count and dtype; either the same memory or none in common.
        tags: one for the parts, one for the results.
        mean: divide the sum by the number of ranks (before it is encoded).
        memory: error feedback of as many elements; its step has begun.
        fold: for integers, by the codec ``none``: what reduces two arrays. None sums floats.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    run = Run(carrier, send, recv, tags, mean, memory, fold)
    count = run.shards.count
    with carrier.transport.keeping(run):
        for k in range(count + _BEHIND):
            for ahead in range(_AHEAD) if k == 0 else (k + _AHEAD - 1,):
                if ahead < count:
                    run.scatter(ahead)
            if k < count:
                yield run.mailbox.arrival(run.parts[k])
                run.reduce(k, run.parts.pop(k), run.others)
            if k >= _BEHIND:
                yield run.mailbox.arrival(run.results[k - _BEHIND])
                run.gather(k - _BEHIND)
        yield from run.mailbox.finish()


class Run:
    """One all-reduce on this rank."""

    def __init__(
        self,
        carrier: Carrier,
        send: Flat,
        recv: Flat,
        tags: Sequence[int],
        mean: bool,
        memory: Memory | None,
        fold: np.ufunc | None,
    ) -> None:
        self.carrier = carrier
        self.send, self.recv = send.data, recv.data
        self.dtype = send.dtype
        # What feedback corrects is in the accumulator's dtype, and so are its messages. Without it a lossless codec
        # carries the sum rounded to the caller's dtype, a lossy one the accumulator itself.
        wide = send.dtype.accumulator
        self.sum_dtype = send.dtype if carrier.codec.lossless and memory is None else wide
        self.part_dtype = send.dtype if memory is None else wide
        self.tags = tags
        self.mean = mean
        self.memory = memory
        self.fold = fold
        self.rank, self.others = carrier.transport.rank, carrier.transport.others
        self.shards = Shards.of(send.size, carrier.transport.size, send.dtype.itemsize, carrier.chunk_bytes)
        self.mailbox = carrier.mailbox()
        self.parts: dict[int, list[Incoming]] = {}
        self.results: dict[int, list[Incoming]] = {}

    def scatter(self, k: int) -> None:
        """Do step 1 for chunk ``k`` of every shard, and post the receives of steps 2 and 4."""
        carrier, shards, mailbox = self.carrier, self.shards, self.mailbox
        owners = [q for q in self.others if shards.size(q, k)]
        own = shards.size(self.rank, k)
        part_bytes = carrier.inbox_bytes(own, self.part_dtype)
        self.parts[k] = [mailbox.receive(part_bytes, q, self.tags[0]) for q in sorted(self.others) if own]
        self.results[k] = [
            mailbox.receive(carrier.inbox_bytes(shards.size(q, k), self.sum_dtype), q, self.tags[1])
            for q in owners
        ]
        spans = [shards.span(q, k) for q in owners]
        messages = carrier.encode_parts(self.send, spans, self.memory)
        for q, message in zip(owners, messages, strict=True):
            mailbox.send(message, [q], self.tags[0])

    def part(self, span: slice) -> Sealed:
        """Encode this rank's part of a span that another rank owns; return the message."""
        (message,) = self.carrier.encode_parts(self.send, [span], self.memory)
        return message

    def reduce(self, k: int, parts: Sequence[Incoming], receivers: list[int]) -> None:
        """Do steps 2 and 3 for chunk ``k`` of this rank's shard; ``parts``, in rank order, have arrived."""
        carrier = self.carrier
        span = self.shards.span(self.rank, k)
        if span.start == span.stop:
            return
        memory = self.memory
        ranks = carrier.transport.size if self.mean else 1
        if self.fold is None and memory is None:
            out = self.recv[span]
            result = carrier.sum_encode(self.send[span], parts, self.part_dtype, self.sum_dtype, ranks, out)
            self.mailbox.send(result, receivers, self.tags[1])
            return
        if self.fold is None:
            acc = carrier.own(self.send[span], memory, span)
            carrier.add(parts, acc, self.part_dtype)
        else:
            acc = self.send[span].copy()
            part = np.empty_like(acc)
            for message in parts:
                carrier.decode(message, part)
                self.fold(acc, part, out=acc)
        if memory is not None:
            result = carrier.encode_sum_with_feedback(acc, memory, span, ranks)
            self.mailbox.send(result, receivers, self.tags[1])
            carrier.decode_own_result(result, self.recv[span], memory, span)
            return
        result = carrier.encode_sum(acc, self.sum_dtype, ranks)
        self.mailbox.send(result, receivers, self.tags[1])
        carrier.decode_own(result, self.recv[span], self.sum_dtype)

    def gather(self, k: int) -> None:
        """Do step 4 for chunk ``k`` of the other ranks' shards."""
        messages = self.results.pop(k)
        spans = [self.shards.span(message.peer, k) for message in messages]
        if self.memory is None:
            self.carrier.decode_many(messages, [self.recv[span] for span in spans], self.sum_dtype)
            return
        for message, span in zip(messages, spans, strict=True):
            self.take(message, span)

    def take(self, message: Incoming, span: slice) -> None:
        """Do step 4 for a span of another rank's shard."""
        if self.memory is None:
            self.carrier.decode(message, self.recv[span], self.sum_dtype)
        else:
            self.carrier.decode_result(message, self.recv[span], self.memory, span)
