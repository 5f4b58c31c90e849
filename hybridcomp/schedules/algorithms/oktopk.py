"""Build an all-reduce by a sparse codec in balanced parts, as in Ok-Topk.

1. Each rank encodes its data once, region by region, and tells all others how many bytes each message has.
2. All ranks cut the regions alike into one run for each rank, of about equally many bytes over all ranks.
3. The owner of a run gets the others' messages of its regions and adds them, its own too, in rank order to zeros.
4. It encodes the sum, of which its codec selects elements, and sends the message to all; all decode the same messages.

After Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (arXiv:2201.07598).
Ok-Topk finds the borders again every so many steps; here they are found at every call, from sizes that cost each rank 4
bytes for a region. Ok-Topk has one threshold for all of the data; here the codec selects in each region, as in each
chunk of the other algorithms.

Where the elements sent crowd in a part of the data, as in gradients of embeddings, equal shards would leave most of the
work to one rank (:mod:`.direct`). A rank receives about 2 (p - 1) / p messages of all of the data, where
:mod:`.sparse` receives p - 1, and the sum is encoded once more. The loss of that goes to the memory of the owner, which
may be another rank at the next call: only the memories' sum counts.

Any rank may own any region, so there are steps for all owners: 4 p for each region, of which about 5 are carried out.
"""

from __future__ import annotations

from hybridcomp.schedules import cuts
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology

_SIZES, _PARTS, _RESULTS = range(3)  # channels


def all_reduce(operation: Operation, topology: Topology, rank: int) -> Schedule:
    """Sum the elements of ``SEND`` that the codec selects over all ranks into ``RECV``."""
    r = Recorder(operation, topology, rank)
    (n,) = operation.counts
    shards = cuts.regions(n, r.ranks, operation.itemsize, operation.chunk_bytes)
    counts = [shards.size(0, k) for k in range(shards.count)]
    regions, everyone = range(shards.count), range(r.ranks)
    if not counts:
        return r.finish()
    starts = [shards.span(0, k).start for k in regions]
    sizes = [r.slot(len(counts), sizes=True) for _ in everyone]
    parts = [[r.slot(count, wide=operation.part_wide) for count in counts] for _ in everyone]
    results = [r.slot(count, wide=operation.sum_wide) for count in counts]

    for q in sorted(r.others):
        r.recv(sizes[q], len(counts), q, _SIZES)
    for k in regions:
        r.encode(parts[rank][k], Span(Buffer.SEND, starts[k], counts[k]), memory=operation.memory(starts[k]))
    r.sizes(parts[rank], sizes[rank])
    for q in r.others:
        r.send(sizes[rank], q, _SIZES)
    r.cut(sizes)

    for k in regions:
        for q in sorted(r.others):
            with r.owned(k, rank):
                r.recv(parts[q][k], counts[k], q, _PARTS)
            with r.owned(k, q):
                r.recv(results[k], counts[k], q, _RESULTS)
    for k, q in _in_turn(r, len(counts)):
        with r.owned(k, q):
            r.send(parts[rank][k], q, _PARTS)
    for k in regions:
        with r.owned(k, rank):
            own = [of[k] for of in parts]
            r.sum_encode(
                own, None, results[k], None, divide=operation.mean, memory=operation.memory(starts[k])
            )
            for q in r.others:
                r.send(results[k], q, _RESULTS)
    for k in regions:
        out = Span(Buffer.RECV, starts[k], counts[k])
        r.decode(results[k], out, memory=operation.memory(starts[k]))
    return r.finish()


def _in_turn(r: Recorder, count: int) -> list[tuple[int, int]]:
    """Return all regions with the other ranks that may own them, so ordered that no owner waits for all of another's.

    Regions of one owner go in their order. Where all weigh the same, the first region of each owner comes first, and so
    on.
    """
    starts = [run[0] if run else count for run in cuts.balanced([1] * count, r.ranks)]
    turns = [(k - starts[q], at, k, q) for at, q in enumerate(r.others) for k in range(count)]
    return [(k, q) for _, _, k, q in sorted(turns)]
