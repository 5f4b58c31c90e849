"""Run operations on a device's memory on a copy in pinned memory of the host, whole.

For what MPI does itself and cannot do on a device's pointers, and for codecs that have no kernels there: correct, and
as fast as the copies let it be. (What a codec's kernels encode crosses encoded: :mod:`~.device.data_path`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.collectives.device.streams import callers_events, stream_pool
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.memory import same_memory
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.device import DeviceArray, Event

Extents = Iterable[tuple[int, int]]


def through_host(
    transport: Transport,
    device: Sequence[DeviceArray],
    send: Flat | None,
    recv: Flat | None,
    run: Callable[[Any, Any], Steps],
    *,
    loads: bool = False,
    written: Callable[[], Extents] | None = None,
    after: Sequence[Event] | None = None,
) -> Steps:
    """Run an operation on host copies of its buffers.

    Args:
        transport: keeps the copies if the operation fails.
        device: the caller's buffers.
        send, recv: what the operation reads and writes, if anything.
        run: the operation, on what takes the place of ``send`` and ``recv``.
        loads: it reads ``recv``, too.
        written: asked when it has ended: first byte and length of each part of ``recv`` that it wrote; None is all.
        after: the device's events that it follows; None is all that the callers' streams have at its first step.
    """
    events = callers_events(device) if after is None else after
    streams = stream_pool(device[0].runtime).pair_after(events)
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
    streams.pool.give(streams)
