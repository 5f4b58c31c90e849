"""Reductions of device arrays by linear codecs, and the error feedback around them.

The kernels leave what ranks are to sum in pinned host memory, by one copy, and fetch the sum from there by another:
any transport takes it. :attr:`.Round.ready` is the copy's event; only a caller that waits for that event waits for the
device, and ``sketch`` before a table is made of the values (see :mod:`.sketch`).
"""

from __future__ import annotations

import abc
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, driver_of, suffix
from hybridcomp.codecs.device.messages import aligned, convert
from hybridcomp.codecs.linear.base import Reduction, Terms
from hybridcomp.device import DeviceArray, Event, Queue
from hybridcomp.errors import CudaUnavailableError

Array = npt.NDArray[Any]

_THREADS = 256
_lock = threading.Lock()
_flying: dict[tuple[int, int], list[tuple[Event, Array]]] = {}


class Staging:
    """Pinned host memory between a queue and the ranks' sums.

    Memory that a copy reads or writes stays alive until the device is done with it, whatever becomes of the reduction.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def host(self, n: int, dtype: npt.DTypeLike) -> Array:
        """Return new pinned elements, uninitialized."""
        kind = np.dtype(dtype)
        raw = self.queue.runtime.pinned(max(1, n * kind.itemsize))
        array: Array = raw[: n * kind.itemsize].view(kind)
        return array

    def fetch(self, source: DeviceArray) -> tuple[Array, Event]:
        """Start to copy ``source`` to new pinned memory; it is there after the event."""
        array = self.host(source.size, source.dtype)
        if source.nbytes:
            self.queue.runtime.copy(array.ctypes.data, source.ptr, source.nbytes, self.queue.stream)
        return array, self._keep(array)

    def send(self, values: Array, to: DeviceArray | None = None) -> DeviceArray:
        """Start to copy pinned ``values``, which nobody may change any more, to ``to`` or new device memory."""
        flat = values.reshape(-1)
        target = self.queue.array(flat.size, flat.dtype) if to is None else to
        if flat.nbytes:
            self.queue.runtime.copy(target.ptr, flat.ctypes.data, flat.nbytes, self.queue.stream)
            self._keep(flat)
        return target

    def send_copy(self, values: Array) -> DeviceArray:
        """Start to copy any ``values`` to new device memory."""
        staged = self.host(values.size, values.dtype)
        staged[:] = values.reshape(-1)
        return self.send(staged)

    def _keep(self, array: Array) -> Event:
        event = self.queue.runtime.record(self.queue.stream)
        key = (id(self.queue.runtime), self.queue.stream)
        with _lock:
            _flying[key] = [(e, a) for e, a in _flying.get(key, []) if not e.done()]
            _flying[key].append((event, array))
        return event


class LinearDriver(Driver):
    """The driver of a linear codec: it launches the codec's kernels."""

    @abc.abstractmethod
    def reduce(self, codec: Codec, x: Flat, terms: Terms, staging: Staging) -> Reduction:
        """Reduce device memory, aligned for its dtype, as :meth:`.linear.LinearCodec.reduction` does."""


def reduce(codec: Codec, x: Flat, terms: Terms, queue: Queue) -> Reduction:
    """Reduce device memory as :meth:`.linear.LinearCodec.reduction` does, in the order of ``queue``.

    Raises:
        CudaUnavailableError: the codec takes no device arrays.
    """
    driver = driver_of(codec.wire_id)
    if not isinstance(driver, LinearDriver):
        raise CudaUnavailableError(f"codec {codec.spec!r} reduces no device arrays")
    data = aligned(queue, x.data, x.dtype.component_bytes)
    queue.start()
    own = Queue(queue.runtime, queue.stream)  # nobody else has set its status
    return driver.reduce(codec, x._replace(data=data), terms, Staging(own))


# -- what drivers share ----------------------------------------------------------------------------------------


def peak(queue: Queue, src: DeviceArray, dtype: DType, most: DeviceArray | None = None) -> DeviceArray:
    """Start to find the largest magnitude; return it as one uint64, the bits of the computing type.

    With ``most``, raise that word to it.
    """
    word = queue.zeros(8).view(np.uint64) if most is None else most
    name = f"peak_{suffix(dtype)}"
    queue.launch("linear", name, queue.blocks(src.size, _THREADS * 16), _THREADS, src, src.size, word)
    return word


def infinity(dtype: DType) -> int:
    """Return the bits of the computing type's infinity: peaks from there on are not finite."""
    return 0x7FF0_0000_0000_0000 if dtype is DType.FLOAT64 else 0x7F80_0000


def fill(queue: Queue, out: DeviceArray, bits: int = 0) -> None:
    """Set all elements to the same bits, unless the queue's status is set."""
    size = out.dtype.itemsize
    blocks = queue.blocks(out.nbytes, _THREADS * 16)
    queue.launch("linear", f"fill_{8 * size}", blocks, _THREADS, out, out.size, bits, queue.status)


def widened(queue: Queue, x: Flat) -> DeviceArray:
    """Return a copy of the values in their accumulator's type."""
    kind = x.dtype.accumulator
    out = queue.array(x.size, kind.storage)
    convert(queue, x.data, x.dtype, out, kind, x.size)
    return out


def multiply(queue: Queue, values: DeviceArray, dtype: DType, factor: int) -> None:
    """Multiply float32 or float64 in place."""
    bits = int(np.float64(factor).view(np.uint64))
    blocks = queue.blocks(values.size, _THREADS * 4)
    queue.launch("linear", f"multiply_{suffix(dtype)}", blocks, _THREADS, values, values.size, bits)


# -- error feedback --------------------------------------------------------------------------------------------


def corrected(queue: Queue, x: Flat, residual: DeviceArray) -> Flat:
    """Return ``x`` plus ``residual`` in the accumulator's type, a new array: a reduction's input under error
    feedback.
    """
    kind = x.dtype.accumulator
    out = queue.array(x.size, kind.storage)
    queue.copy(out, residual)
    convert(queue, aligned(queue, x.data, x.dtype.component_bytes), x.dtype, out, kind, x.size, add=True)
    return Flat(out, kind, x.shape, True, False)


def keep_lost(queue: Queue, given: Flat, own: DeviceArray, residual: DeviceArray) -> None:
    """Set ``residual`` to ``given - own``, the error of the result for this rank's data, if all of it is finite.

    Args:
        queue: queue of the reduction.
        given: input of the reduction, float32 or float64.
        own: :attr:`.Reduced.own` of the reduction.
        residual: array to set, of the same size and type.
    """
    most = queue.zeros(8)
    n, name = given.size, suffix(given.dtype)
    blocks = queue.blocks(n, _THREADS * 4)
    queue.launch("linear", f"lost_peak_{name}", blocks, _THREADS, given.data, own, n, most)
    queue.launch("linear", f"keep_lost_{name}", blocks, _THREADS, given.data, own, n, most, residual)
