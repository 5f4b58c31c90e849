"""The forms of error feedback on a device that keep an error as it is: ``ef``, ``ef-sgdm``."""

from __future__ import annotations

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device import block
from hybridcomp.codecs.device.driver import suffix
from hybridcomp.codecs.device.memory import MODULE, DeviceMemory, Keep, aligned_room, read
from hybridcomp.codecs.device.messages import Encoded
from hybridcomp.codecs.device.states import Slot, Slots
from hybridcomp.codecs.feedback import memories
from hybridcomp.codecs.feedback import memory as host
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES


class PlainMemory(DeviceMemory):
    """The memory of ``ef`` on a device.

    Attributes:
        state: slot of the error.
    """

    name = "ef"
    keeps_later = True

    def __init__(self, form: Form, n: int, kind: DType, queue: Queue, slots: Slots) -> None:
        super().__init__(form, n, kind, queue, slots)
        self.state = slots.take(n * kind.itemsize, queue)
        self._bad = queue.zeros(4)  # of steps over the whole array; zero again after each
        self._blended_with: DeviceArray | None = None
        self._beta = 0.0

    def blend(self, momentum: DeviceArray | None, beta: float = 0.0) -> None:
        """Send a momentum of which data are a part: see :meth:`.memories.PlainMemory.blend`."""
        self._blended_with, self._beta = momentum, beta

    def correct(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        if self._blended_with is None:
            return self._corrected(data, queue, span)
        corrected = self._array(data.size, queue)
        self._blend(data, queue, span, self.state.word, corrected)
        return corrected

    def _corrected(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        corrected = self._array(data.size, queue)
        self._add(queue, data, self.state, corrected, start=span.start)
        return corrected

    def _blend(
        self, data: Flat, queue: Queue, span: slice, error: DeviceArray | None, out: DeviceArray
    ) -> None:
        assert self._blended_with is not None
        shares = self._number(self._beta), self._number(1 - self._beta)
        args = (data.data, data.size, self._blended_with[span], *shares, error, span.start, out, None)
        self._run(queue, f"blend_{suffix(data.dtype)}", data.size, *args)

    def own(self, codec: Codec, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        if self._blended_with is None:
            return super().own(codec, data, queue, span)
        total = self._array(data.size, queue)
        self._blend(data, queue, span, None, total)
        return total

    def encode_sum_first(
        self, codec: Codec, total: DeviceArray, out: DeviceArray, queue: Queue, span: slice, ranks: int
    ) -> tuple[Encoded, Keep | None]:
        corrected = self._corrected(self._flat(total), queue, span)
        self._divide(corrected, ranks, queue)
        encoded = self._write(codec, corrected, corrected.shape, out, queue)
        return encoded, self._keep_later(codec, encoded, corrected, queue, span, ranks)

    def keep(
        self, corrected: DeviceArray, decoded: DeviceArray, queue: Queue, span: slice, weight: float = 1.0
    ) -> None:
        n, (fresh, bad) = corrected.size, self._fresh(corrected.size, queue)
        where = (None, fresh.word) if isinstance(fresh, Slot) else (fresh, None)
        args = (corrected, decoded, *where, n, self._number(weight), bad)
        self._run(queue, self._of("lose"), n, *args)
        self._take_over(fresh, bad, queue, span)

    def _fresh(self, n: int, queue: Queue) -> tuple[Slot | DeviceArray, DeviceArray]:
        """Return memory for the next state of ``n`` elements, and the word that tells that it is not finite."""
        if n == self.n:
            return self._slots.spare(self.state.nbytes, queue), self._bad
        return self._array(n, queue), queue.zero_words(1)

    def _take_over(self, fresh: Slot | DeviceArray, bad: DeviceArray, queue: Queue, span: slice) -> None:
        if isinstance(fresh, Slot):
            queue.launch(MODULE, "feedback_exchange", 1, 32, self.state.word, fresh.word, bad)
            return
        start = span.start * self.kind.itemsize
        args = (None, self.state.word, start, fresh, fresh.nbytes, bad, None)
        self._run(queue, "commit", -(-fresh.nbytes // 4), *args)

    def _encode_fused(
        self, codec: Codec, data: Flat, out: DeviceArray, queue: Queue, span: slice
    ) -> Encoded | None:
        if codec.integer_blocks is None or self._blended_with is not None:
            return None
        form = block.Form(*codec.integer_blocks)
        n, (fresh, bad) = data.size, self._fresh(data.size, queue)
        buffer = aligned_room(codec, n, self.kind, out, queue)
        payload = buffer[HEADER_BYTES:]
        size = block.encode_feedback(
            form, data.data, data.dtype, self.state, span.start, fresh, bad, payload, queue
        )
        self._take_over(fresh, bad, queue, span)
        return self._sealed(codec, buffer, n, size, out, queue)

    def arrays(self) -> dict[str, host.Array]:
        return {"": self.state.read(self.kind.storage, self._queue)}

    def load(self, memory: memories.PlainMemory, queue: Queue) -> None:
        self.state.write(memory.error, queue)

    def _held(self) -> list[Slot]:
        return [self.state]


class AcceleratedMemory(PlainMemory):
    """The memory of ``ef-sgdm`` on a device.

    Attributes:
        velocity: u, the velocity.
    """

    name = "ef-sgdm"
    keeps_later = False

    def __init__(self, form: Form, n: int, kind: DType, queue: Queue, slots: Slots) -> None:
        super().__init__(form, n, kind, queue, slots)
        self._momentum: float = form.options["momentum"]
        self.velocity = self._zeros(queue)
        self._moved: DeviceArray | None = None

    def _accelerate(
        self, data: Flat, queue: Queue, span: slice, bad: DeviceArray | None = None
    ) -> tuple[DeviceArray, DeviceArray]:
        """Return data with momentum, and the next velocity; set ``bad`` if that is not finite."""
        n, step, moved = data.size, self._array(data.size, queue), self._array(data.size, queue)
        kernel, momentum = f"accelerate_{suffix(data.dtype)}", self._number(self._momentum)
        self._run(queue, kernel, n, data.data, self.velocity[span], moved, step, n, momentum, bad)
        return step, moved

    def correct(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        step, self._moved = self._accelerate(data, queue, span)
        return super().correct(self._flat(step), queue, span)

    def keep(
        self, corrected: DeviceArray, decoded: DeviceArray, queue: Queue, span: slice, weight: float = 1.0
    ) -> None:
        super().keep(corrected, decoded, queue, span, weight)
        self._moved = None

    def _take_over(self, fresh: Slot | DeviceArray, bad: DeviceArray, queue: Queue, span: slice) -> None:
        if self._moved is not None:  # not for a sum, which has no velocity
            self._commit(self.velocity[span], self._moved, queue, bad)
        super()._take_over(fresh, bad, queue, span)

    def _encode_fused(
        self, codec: Codec, data: Flat, out: DeviceArray, queue: Queue, span: slice
    ) -> Encoded | None:
        if codec.integer_blocks is None:
            return None
        step, self._moved = self._accelerate(data, queue, span)
        encoded = super()._encode_fused(codec, self._flat(step), out, queue, span)
        self._moved = None
        return encoded

    def own(self, codec: Codec, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        bad = queue.zero_words(1)
        step, moved = self._accelerate(data, queue, span, bad)
        self._commit(self.velocity[span], moved, queue, bad)
        return step

    def arrays(self) -> dict[str, host.Array]:
        return super().arrays() | {"velocity": read(self.velocity, self._queue)}

    def load(self, memory: memories.PlainMemory, queue: Queue) -> None:
        super().load(memory, queue)
        assert isinstance(memory, memories.AcceleratedMemory)
        queue.write(self.velocity, memory.velocity)
