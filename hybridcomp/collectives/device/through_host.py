"""Run operations on a device's memory on a whole copy in the host's pinned memory.

This serves MPI's own operations that MPI cannot do on a device's pointers, and codecs that have no kernels for the
device: correct, and as fast as the copies let it be. (Arrays of a codec with kernels cross encoded:
:mod:`~.device.data_path`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.collectives.device.joint import pair_for
from hybridcomp.collectives.device.streams import callers_events
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.memory import same_memory
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray, Event

ByteExtents = Iterable[tuple[int, int]]


def through_host(
    transport: Transport,
    device: Sequence[DeviceArray],
    send: Flat | None,
    recv: Flat | None,
    run: Callable[[Any, Any], Steps],
    *,
    loads: bool = False,
    written: Callable[[], ByteExtents] | None = None,
    after: Sequence[Event] | None = None,
) -> Steps:
    """Run an operation on host copies of its buffers.

    Args:
        transport: transport, which keeps the copies if the operation fails.
        device: buffers of the caller.
        send, recv: buffers that the operation reads and writes, if any.
        run: function that runs the operation on the copies of ``send`` and ``recv``.
        loads: whether it reads ``recv``, too.
        written: function called when it has ended: returns the first byte and length of each part of ``recv`` that it
            wrote; None if it wrote all.
        after: events of the device that it follows; None for all work of the callers' streams at its first step.
    """
    events = callers_events(device) if after is None else after
    streams = pair_for(transport.joint, device[0].runtime, events)
    pool = streams.pool.pinned
    taken: list[ByteArray] = []

    def place(flat: Flat) -> tuple[Flat, ByteArray]:
        taken.append(pool.take(flat.nbytes))
        raw = taken[-1][: flat.nbytes]
        return flat._replace(data=raw.view(flat.dtype.storage), shares=True, is_torch=False), raw

    source = target = None
    raw = np.empty(0, np.uint8)
    copies = []
    if send is not None:
        source, raw = place(send)
        copies.append((raw, send.data))
    if recv is not None:
        if send is not None and same_memory(send.data, recv.data):
            target = source
        else:
            target, raw = place(recv)
            if loads:
                copies.append((raw, recv.data))
    with transport.keeping((taken, streams)):
        if copies:
            yield Pending([], [], events=[streams.download(copies)])
        yield from run(source, target)
        if recv is not None:
            to = recv.data.view(np.uint8)
            for start, length in [(0, raw.size)] if written is None else written():
                streams.upload(to[start : start + length], raw[start : start + length])
            yield Pending([], [], events=[streams.record()])
    for buffer in taken:
        pool.give(buffer)
    streams.give()
