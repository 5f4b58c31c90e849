"""Reduce of floats to one rank by a codec.

``direct``: every rank encodes its data once, and the root adds what all sent in rank order. The result is as near as
the codec allows, but everything goes into the root's link.

``tree``: ranks are a binomial tree with the root at its top. Each adds its children's partial sums to its own data, in
float32 (float64 for float64), and sends the encoded sum to its parent; data are encoded again at each of up to
log2(p) hops, and the error grows with the square root of their number. Lossless codecs carry partial sums in the
accumulator's type, and so are exact up to the order of the sum.

Chunks are pipelined. The result itself is not encoded. There is no error feedback: broadcasts and reductions to a root
carry what is wanted exactly, or once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridcomp.arrays import DType, Flat
from hybridcomp.collectives.algorithms.bcast import binomial_tree
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules.shards import Shards

_AHEAD = 3  # chunks for which there is room before they are summed


def direct_reduce(
    carrier: Carrier, send: Flat, recv: Flat | None, root: int, tags: Sequence[int], *, mean: bool = False
) -> Steps:
    """Sum ``send`` over all ranks into ``recv`` of rank ``root``, which gets every rank's message.

    Args:
        carrier: codec, transport and statistics.
        send: the same count and dtype on all ranks.
        recv: at the root, as ``send``: either the same memory or none in common. Elsewhere it is not used.
        root: who gets the sum.
        tags: one.
        mean: divide the sum by the number of ranks.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t = carrier.transport
    sources = [(q, send.dtype) for q in range(t.size) if q != root] if t.rank == root else []
    yield from _upward(carrier, send, recv, None if t.rank == root else root, sources, tags, mean)


def tree_reduce(
    carrier: Carrier, send: Flat, recv: Flat | None, root: int, tags: Sequence[int], *, mean: bool = False
) -> Steps:
    """Sum ``send`` over all ranks into ``recv`` of rank ``root``, up a binomial tree.

    Args:
        carrier, send, recv, root, tags, mean: as of :func:`direct_reduce`.

    Raises:
        WireError, MismatchError: from a child's message.
    """
    t = carrier.transport
    parent, children = binomial_tree((t.rank - root) % t.size, t.size)
    sources = []
    for child in reversed(children):  # the smallest subtree first: it is ready first
        leaf = not binomial_tree(child, t.size)[1]
        sources.append(((child + root) % t.size, send.dtype if leaf else send.dtype.accumulator))
    up = None if parent is None else (parent + root) % t.size
    yield from _upward(carrier, send, recv, up, sources, tags, mean)


def _upward(
    carrier: Carrier,
    send: Flat,
    recv: Flat | None,
    parent: int | None,
    sources: list[tuple[int, DType]],
    tags: Sequence[int],
    mean: bool,
) -> Steps:
    """Add ``sources`` (ranks, and the dtype of their messages) to ``send``, and give the sum to ``parent``."""
    t = carrier.transport
    (tag,) = tags
    mailbox = carrier.mailbox()
    shards = Shards.fixed(send.size, 1, send.size, send.dtype.itemsize, carrier.chunk_bytes)
    coming: dict[int, list[Incoming]] = {}

    def expect(k: int) -> None:
        n = shards.size(0, k)
        coming[k] = [mailbox.receive(carrier.inbox_bytes(n, dtype), q, tag) for q, dtype in sources]

    with t.keeping((mailbox, coming)):
        for k in range(min(_AHEAD, shards.count)):
            expect(k)
        for k in range(shards.count):
            span = shards.span(0, k)
            if not sources:
                assert parent is not None
                mailbox.send(carrier.encode(send.data[span]), [parent], tag)
                continue
            acc: Any = carrier.own(send.data[span], None, span)
            for message, (_, dtype) in zip(coming.pop(k), sources, strict=True):
                yield mailbox.arrival([message])
                carrier.add([message], acc, dtype)
            if k + _AHEAD < shards.count:
                expect(k + _AHEAD)
            if parent is not None:
                mailbox.send(carrier.encode(acc, send.dtype.accumulator), [parent], tag)
            else:
                assert recv is not None
                carrier.store(acc, recv.data[span], t.size if mean else 1)
        yield from mailbox.finish()
