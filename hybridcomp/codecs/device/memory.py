"""Hold the error-feedback state of one key on a device, as :mod:`hybridcomp.codecs.feedback.memory` does on the host.

Messages and states are the same, bit for bit. Only the device knows whether a step was finite: kernels set a word if
not, and others then leave the state as it was. The host waits only for codecs whose messages vary in length.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import driver_of, suffix
from hybridcomp.codecs.device.messages import Encoded, convert, encode_into, open_message, read_opened, seal
from hybridcomp.codecs.device.states import Slot, Slots
from hybridcomp.codecs.feedback import memory as host
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.device import ALIGNMENT, DeviceArray, Queue
from hybridcomp.errors import CodecMismatchError
from hybridcomp.wire import HEADER_BYTES, Header

MODULE = "feedback"
Keep = Callable[[Queue, Header, bytes], None]
"""Function that keeps a message's error, given its header and the first bytes of its payload."""
_THREADS = 256


class DeviceMemory(abc.ABC):
    """The state of one key; made by :meth:`~hybridcomp.codecs.feedback.error_feedback.ErrorFeedback.device_memory`.

    Its methods are those of :class:`.memory.Memory`, with arrays of the device and a queue for what
    they launch. All queues of a memory must be in order: one stream, or several that wait for each other.

    Attributes:
        form: form of feedback, with its parameters.
        n: number of elements.
        kind: dtype of all that is computed here: float32, or float64 for float64 data.
        steps: number of calls of :meth:`begin`.
        tracks: whether the receiver adds messages to what it has (:meth:`result`), rather than take them.
        apart: whether spans have nothing in common, so that one may be encoded beside another.
        keeps_later: whether errors may be kept after other spans were encoded.
    """

    name: ClassVar[str]
    tracks: ClassVar[bool] = False
    apart: ClassVar[bool] = True
    keeps_later: ClassVar[bool] = False

    def __init__(self, form: Form, n: int, kind: DType, queue: Queue, slots: Slots) -> None:
        self.form = form
        self.n = n
        self.kind = kind
        self.steps = 0
        self._slots = slots
        self._queue = queue  # the last one, for saving

    @property
    def runtime(self) -> Any:
        """Return the device's runtime."""
        return self._queue.runtime

    def follow(self, queue: Queue) -> None:
        """Order all later work on ``queue`` after the work of this memory's last queue."""
        if queue.stream != self._queue.stream:
            self._queue.start()
            queue.runtime.follow(queue.stream, queue.runtime.record(self._queue.stream))

    # -- a sender ------------------------------------------------------------------------------------

    def begin(self, queue: Queue) -> int:
        """Begin a step, of one or of many spans; return its number, from 0, for :meth:`Codec.at_step`."""
        self._queue = queue
        self.steps += 1
        return self.steps - 1

    def encode(
        self, codec: Codec, data: Flat, out: DeviceArray, queue: Queue, span: slice | None = None
    ) -> Encoded:
        """Start to encode corrected data and keep the error of the message.

        Args:
            codec: codec of the message, whose dtype is :attr:`kind`.
            data: array of any floating-point dtype; not changed.
            out: buffer of at least ``codec.bound(data.size, kind)`` bytes.
            queue: queue to launch on.
            span: where ``data`` lies in the array; None is all of it.

        Raises:
            CodecMismatchError: the codec cannot carry the data.
        """
        encoded, keep = self.encode_first(codec, data, out, queue, slice(0, self.n) if span is None else span)
        if keep is not None:
            keep(queue, *self._beginning(codec, encoded, data.size, queue))
        return encoded

    def encode_first(
        self, codec: Codec, data: Flat, out: DeviceArray, queue: Queue, span: slice
    ) -> tuple[Encoded, Keep | None]:
        """Start to encode corrected data as :meth:`encode` does, without waiting for the device.

        Returns:
            The message; and, if its error has not been kept, the function that does so, to be called once the host
            knows the message's header and the first bytes of its payload.
        """
        encoded = self._encode_fused(codec, data, out, queue, span)
        if encoded is not None:
            return encoded, None
        corrected = self.correct(data, queue, span)
        encoded = self._write(codec, corrected, data.shape, out, queue)
        return encoded, self._keep_later(codec, encoded, corrected, queue, span, 1.0)

    @abc.abstractmethod
    def correct(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        """Return the array to encode for ``data``; it goes back to :meth:`keep`."""

    @abc.abstractmethod
    def keep(
        self, corrected: DeviceArray, decoded: DeviceArray, queue: Queue, span: slice, weight: float = 1.0
    ) -> None:
        """Store the error of a message, unless it is not finite. Both arrays are not to be used any more."""

    def _encode_fused(
        self, codec: Codec, data: Flat, out: DeviceArray, queue: Queue, span: slice
    ) -> Encoded | None:
        """Encode as :meth:`encode` does, in one pass over memory; return None where there is no kernel for it."""
        return None

    # -- the owner of a shard ------------------------------------------------------------------------

    def own(self, codec: Codec, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        """Return a new array for the sum of all ranks' parts of an owned span, with this rank's own part in it."""
        wide = self._array(data.size, queue)
        convert(queue, data.data, data.dtype, wide, self.kind, data.size)
        return wide

    def encode_sum(
        self, codec: Codec, total: DeviceArray, out: DeviceArray, queue: Queue, span: slice, ranks: int = 1
    ) -> Encoded:
        """Start to encode the sum of an owned span, over ``ranks`` for a mean. ``total`` is not to be used any more."""
        encoded, keep = self.encode_sum_first(codec, total, out, queue, span, ranks)
        if keep is not None:
            keep(queue, *self._beginning(codec, encoded, total.size, queue))
        return encoded

    def encode_sum_first(
        self, codec: Codec, total: DeviceArray, out: DeviceArray, queue: Queue, span: slice, ranks: int
    ) -> tuple[Encoded, Keep | None]:
        """Start to encode a sum as :meth:`encode_sum` does; otherwise as :meth:`encode_first`."""
        corrected = self.correct(self._flat(total), queue, span)
        self._divide(corrected, ranks, queue)
        encoded = self._write(codec, corrected, corrected.shape, out, queue)
        return encoded, self._keep_later(codec, encoded, corrected, queue, span, ranks)

    def result(self, values: DeviceArray, queue: Queue, span: slice) -> None:
        """Turn the decoded values of an :meth:`encode_sum` message into the result, in place, where :attr:`tracks`."""
        raise NotImplementedError(f"messages of {self.name} are results")

    # -- saving --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def arrays(self) -> dict[str, host.Array]:
        """Return the state's arrays in host memory by name, as the host's memory of this form; waits for the device."""

    @abc.abstractmethod
    def load(self, memory: Any, queue: Queue) -> None:
        """Load the state of the host's memory of this form, of the same size and kind; waits for the device."""

    def drop(self) -> None:
        """Release the memory, which is not used any more."""
        for slot in self._held():
            self._slots.give(slot, self._queue)

    def _held(self) -> list[Slot]:
        """Return the slots that this has taken."""
        return []

    # -- what forms share ----------------------------------------------------------------------------

    def _array(self, n: int, queue: Queue) -> DeviceArray:
        return queue.array(n, self.kind.storage)

    def _zeros(self, queue: Queue) -> DeviceArray:
        return queue.zeros(self.n * self.kind.itemsize).view(self.kind.storage)

    def _flat(self, values: DeviceArray) -> Flat:
        return Flat(values, self.kind, values.shape, True, False)

    def _number(self, value: float) -> int:
        """Return the bits of a number in :attr:`kind`."""
        wide = self.kind is DType.FLOAT64
        bits: int = struct.unpack("<Q" if wide else "<I", struct.pack("<d" if wide else "<f", value))[0]
        return bits

    def _run(self, queue: Queue, kernel: str, n: int, *args: int | DeviceArray | None) -> None:
        queue.launch(MODULE, f"feedback_{kernel}", queue.blocks(n, _THREADS * 4, _WAVES), _THREADS, *args)

    def _of(self, kernel: str) -> str:
        return f"{kernel}_{suffix(self.kind)}"

    def _add(
        self,
        queue: Queue,
        data: Flat,
        state: Slot | DeviceArray,
        out: DeviceArray,
        *,
        start: int = 0,
        bad: DeviceArray | None = None,
        subtract: bool = False,
    ) -> None:
        """Compute ``out = data + state``, or with a minus; ``start`` is the first element of a slot to add."""
        name = f"{'subtract' if subtract else 'add'}_{suffix(data.dtype)}"
        where = (None, state.word) if isinstance(state, Slot) else (state, None)
        self._run(queue, name, data.size, data.data, data.size, *where, start, out, bad)

    def _divide(self, values: DeviceArray, ranks: int, queue: Queue) -> None:
        if ranks > 1:
            self._run(queue, self._of("divide"), values.size, values, values.size, self._number(ranks))

    def _commit(self, to: DeviceArray, fresh: DeviceArray, queue: Queue, *bad: DeviceArray | None) -> None:
        """Copy ``fresh`` to a state unless one of at most two words is set."""
        words = (*bad, None, None)[:2]
        self._run(queue, "commit", -(-fresh.nbytes // 4), to, None, 0, fresh, fresh.nbytes, *words)

    def _write(
        self, codec: Codec, values: DeviceArray, shape: tuple[int, ...], out: DeviceArray, queue: Queue
    ) -> Encoded:
        """Encode ``values``; the message is at an aligned address too, where its own sender decodes it."""
        flat = Flat(values, self.kind, shape, True, False)
        reason = codec.refuses(flat)
        if reason is not None:
            raise CodecMismatchError(f"codec {codec.spec!r} cannot carry this array: {reason}")
        buffer = aligned_room(codec, values.size, self.kind, out, queue)
        encoded = encode_into(codec, flat, buffer, queue)
        if buffer.ptr != out.ptr:
            queue.copy(out, buffer)
        return encoded

    def _sealed(
        self, codec: Codec, buffer: DeviceArray, n: int, payload: int, out: DeviceArray, queue: Queue
    ) -> Encoded:
        """Write the header of the message whose payload is in a buffer of :func:`aligned_room`; return the message."""
        encoded = seal(buffer, codec.wire_id, codec.params_hash, self.kind, n, payload, queue)
        if buffer.ptr != out.ptr:
            queue.copy(out, buffer)
        return encoded

    def _keep_later(
        self,
        codec: Codec,
        encoded: Encoded,
        corrected: DeviceArray,
        queue: Queue,
        span: slice,
        weight: float,
    ) -> Keep | None:
        """Keep the error of a message now, or return the function that does so if the host would wait for it."""

        def keep(queue: Queue, header: Header, head: bytes) -> None:
            payload = encoded.buffer[HEADER_BYTES : HEADER_BYTES + header.payload]
            decoded = self._array(corrected.size, queue)
            driver_of(codec.wire_id).decode(header, head, payload, decoded, self.kind, False, queue)
            self.keep(corrected, decoded, queue, span, weight)

        if self.keeps_later and driver_of(codec.wire_id).head(codec) is None:
            return keep
        keep(queue, *self._beginning(codec, encoded, corrected.size, queue))
        return None

    def _beginning(self, codec: Codec, encoded: Encoded, n: int, queue: Queue) -> tuple[Header, bytes]:
        """Return a message's header, and what a driver reads of its payload.

        Waits for the device if the host cannot know the payload.
        """
        head = driver_of(codec.wire_id).head(codec)
        if head is None:
            return read_opened(queue, encoded.buffer, open_message(queue, encoded.buffer))
        most = driver_of(codec.wire_id).reads_lengths(codec) and encoded.size is None
        size = encoded.buffer.size if most else encoded.nbytes(queue)
        return Header(codec.wire_id, self.kind, n, size - HEADER_BYTES, codec.params_hash), head

    def _decoded(self, codec: Codec, encoded: Encoded, n: int, queue: Queue) -> DeviceArray:
        """Return the values that the receiver of a message decodes; waits as :meth:`_beginning` does."""
        header, head = self._beginning(codec, encoded, n, queue)
        payload = encoded.buffer[HEADER_BYTES : HEADER_BYTES + header.payload]
        decoded = self._array(n, queue)
        driver_of(codec.wire_id).decode(header, head, payload, decoded, self.kind, False, queue)
        return decoded


_WAVES = 64


def aligned_room(codec: Codec, n: int, kind: DType, out: DeviceArray, queue: Queue) -> DeviceArray:
    """Return ``out``, or memory at an aligned address, for a message of ``n`` elements."""
    need = codec.bound(n, kind)
    return out[:need] if out.ptr % ALIGNMENT == 0 else queue.empty(need)


def read(array: DeviceArray, queue: Queue) -> npt.NDArray[Any]:
    """Return a copy in host memory; waits for the device."""
    return np.array(queue.read(array))
