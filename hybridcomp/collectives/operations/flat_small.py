"""Start one uncompressed all-reduce of small parts of an array, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.codecs.device.messages import copy_bytes
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.device.joint import Joint, pair_for
from hybridcomp.collectives.device.streams import callers_events
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.operations.flat_parts import Together
from hybridcomp.collectives.starting import Operands, OperationStarter, Started
from hybridcomp.collectives.stats import allreduce_bytes
from hybridcomp.cuda import prepare_in_turn
from hybridcomp.device import DeviceArray
from hybridcomp.policy import Choice

_GATHERS = "gather"  # forks of a queue that put parts side by side, or back
SMALL = Choice(NONE, None, "small")


def allreduce_small(
    comm: OperationStarter[Started],
    data: Flat,
    together: Together,
    reduction: str,
    choice: Choice = SMALL,
) -> Started:
    """Start one all-reduce of small parts of an array, by the codec ``none``.

    The rank that adds up an element, and so the bits of the result, depend on the element's place in its part alone.
    Parts on a device are copied to the host: one copy for each part, where shards side by side would take one for each
    rank; of operations that travel together, one copy of parts that a kernel puts side by side.

    Args:
        comm: starter of the operation.
        data: the array.
        together: parts of the array.
        reduction: ``"sum"`` or ``"avg"``.
        choice: choice without a codec, under whose reason the operation is counted.
    """
    nbytes = together.size * data.dtype.itemsize
    about = {"count": together.size, "dtype": data.dtype, "reduction": reduction, "name": together.names}
    ranks = comm.size
    call = comm.new_call("all_reduce", choice, nbytes, allreduce_bytes(nbytes, ranks), **about)
    call.carries = len(together.parts)
    arrays: list[Any] = [data.data[part.start : part.start + part.size] for part in together.parts]

    def summed(carrier: Carrier, beside: Coalesced) -> Steps:
        beside.gather()
        flat = Flat(beside.values, data.dtype, beside.values.shape, True, False)
        key = OperationKey.of("all_reduce", choice, data.dtype, (flat.size,), reduction)
        yield from comm.sum_array(carrier, flat, key, "direct", reserved)
        beside.write_back()

    def run(carrier: Carrier, _send: Any, _recv: Any, _memory: Any) -> Steps:
        if isinstance(data.data, DeviceArray):
            joint = carrier.transport.joint
            return _on_host(joint, arrays, after, lambda here: summed(carrier, Coalesced(here, ranks)))
        return summed(carrier, Coalesced(arrays, ranks))

    reserved = comm.reserve()
    after = []
    if isinstance(data.data, DeviceArray):
        prepare_in_turn(("convert",), data.data.runtime)
        after = callers_events(arrays)
    return comm.start_carried(run, NONE, call, Operands(data, data))


def _on_host(
    joint: Joint | None,
    arrays: Sequence[DeviceArray],
    after: Sequence[Any],
    run: Callable[[list[Array]], Steps],
) -> Steps:
    """Run steps on host copies of a device's arrays, and copy the values back to the arrays."""
    streams = pair_for(joint, arrays[0].runtime, after)
    pool = streams.pool.pinned
    nbytes = sum(_aligned(array.nbytes) for array in arrays)
    staged = pool.take(nbytes)
    parts: list[tuple[ByteArray, DeviceArray]] = []
    spans: list[slice] = []
    at = 0
    for array in arrays:
        spans.append(slice(at, at + array.nbytes))
        parts.append((staged[spans[-1]], array.view(np.uint8)))
        at += _aligned(array.nbytes)
    copies, beside = parts, None
    if joint is not None:
        beside = streams.queue.empty(nbytes)
        for span, (_, there) in zip(spans, parts, strict=True):
            copy_bytes(streams.queue.fork(_GATHERS), there, beside[span], there.size)
        copies = [(staged[:nbytes], beside)]
    yield Pending([], [], events=[streams.download(copies)])
    yield from run([here.view(array.dtype) for (here, _), array in zip(parts, arrays, strict=True)])
    for here, there in copies:
        streams.upload(there, here)
    if beside is not None:
        for span, (_, there) in zip(spans, parts, strict=True):
            copy_bytes(streams.queue.fork(_GATHERS), beside[span], there, there.size)
    yield Pending([], [], events=[streams.record()])
    pool.give(staged)
    streams.give()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
