"""Start one uncompressed all-reduce of small parts of an array, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.device.streams import callers_events, stream_pool
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.operations.flat_parts import Extent
from hybridcomp.collectives.starting import Operands, OperationStarter, Started
from hybridcomp.collectives.stats import allreduce_bytes
from hybridcomp.device import DeviceArray
from hybridcomp.policy import Choice

SMALL = Choice(NONE, None, "small")


def allreduce_small(
    comm: OperationStarter[Started],
    data: Flat,
    parts: Sequence[Extent],
    reduction: str,
    choice: Choice = SMALL,
) -> Started:
    """Start one all-reduce of small parts of an array, by the codec ``none``.

    The rank that adds up an element, and so the bits of the result, depend on the element's place in its part alone.
    Parts on a device are copied to the host: one copy for each part, where shards side by side would take one for each
    rank.

    Args:
        comm: starter of the operation.
        data: the array.
        parts: parts of the array, at least one.
        reduction: ``"sum"`` or ``"avg"``.
        choice: choice without a codec, under whose reason the operation is counted.
    """
    size = sum(part.size for part in parts)
    nbytes = size * data.dtype.itemsize
    names = ", ".join(part.name for part in parts)
    about = {"count": size, "dtype": data.dtype, "reduction": reduction, "name": names}
    call = comm._call("all_reduce", choice, nbytes, allreduce_bytes(nbytes, comm.size), **about)
    arrays: list[Any] = [data.data[part.start : part.start + part.size] for part in parts]

    def summed(carrier: Carrier, together: Coalesced) -> Steps:
        together.gather()
        flat = Flat(together.values, data.dtype, together.values.shape, True, False)
        key = OperationKey.of("all_reduce", choice, data.dtype, (flat.size,), reduction)
        yield from comm._sum_array(carrier, flat, key, "direct", reserved)
        together.write_back()

    def run(carrier: Carrier, _send: Any, _recv: Any, _memory: Any) -> Steps:
        if isinstance(data.data, DeviceArray):
            yield from _on_host(arrays, after, lambda here: summed(carrier, Coalesced(here, comm.size)))
        else:
            yield from summed(carrier, Coalesced(arrays, comm.size))

    reserved = comm._reserve()
    after = callers_events(arrays) if isinstance(data.data, DeviceArray) else []
    return comm._carried(run, NONE, call, Operands(data, data))


def _on_host(
    arrays: Sequence[DeviceArray], after: Sequence[Any], run: Callable[[list[Array]], Steps]
) -> Steps:
    """Run steps on host copies of a device's arrays, and copy the values back to the arrays."""
    streams = stream_pool(arrays[0].runtime).pair_after(after)
    pool = streams.pool.pinned
    staged = pool.take(sum(_aligned(array.nbytes) for array in arrays))
    copies: list[tuple[ByteArray, DeviceArray]] = []
    at = 0
    for array in arrays:
        copies.append((staged[at : at + array.nbytes], array.view(np.uint8)))
        at += _aligned(array.nbytes)
    yield Pending([], [], events=[streams.download(copies)])
    yield from run([here.view(array.dtype) for (here, _), array in zip(copies, arrays, strict=True)])
    for here, there in copies:
        streams.upload(there, here)
    yield Pending([], [], events=[streams.record()])
    pool.give(staged)
    streams.pool.give(streams)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
