"""Compare and copy the memory of an operation's flat buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridcomp.arrays import Flat
from hybridcomp.device import DeviceArray, Queue


def on_device(*flats: Flat | None) -> list[DeviceArray]:
    """Return the buffers of one call that are on a device: all of them, or none.

    Raises:
        TypeError: one is on a device and another is elsewhere.
    """
    given = [flat.data for flat in flats if flat is not None]
    device = [data for data in given if isinstance(data, DeviceArray)]
    if device and len(device) < len(given):
        raise TypeError(
            "one buffer is on a device and the other in host memory: give both in the same memory"
        )
    if any(data.runtime is not device[0].runtime for data in device):
        names = " and ".join(f"device {data.runtime.ordinal}" for data in device)
        raise TypeError(f"the buffers are on {names}: give both on the same")
    return device


def overlap(a: Flat, b: Flat) -> bool:
    """Tell whether two buffers in the same memory have bytes in common."""
    if isinstance(a.data, DeviceArray):
        ends = (a.data.ptr + a.nbytes, b.data.ptr + b.nbytes)
        return bool(a.nbytes and b.nbytes and a.data.ptr < ends[1] and b.data.ptr < ends[0])
    return bool(np.may_share_memory(a.data, b.data, max_work=0))


def same_memory(a: Any, b: Any) -> bool:
    """Tell whether two contiguous arrays begin at the same address and are equally long."""
    if isinstance(a, DeviceArray):
        return bool(a.ptr == b.ptr and a.nbytes == b.nbytes)
    return bool(a.ctypes.data == b.ctypes.data and a.nbytes == b.nbytes)


def copied(flat: Flat) -> Flat:
    """Return a copy of a buffer, in the order of its owner's stream if it is on a device."""
    data = flat.data
    if isinstance(data, DeviceArray):
        queue = Queue(data.runtime, data.runtime.current_stream(data.owner))
        copy = queue.array(data.size, data.dtype)
        queue.copy(copy, data)
        return flat._replace(data=copy, shares=False)
    return flat._replace(data=data.copy(), shares=False)
