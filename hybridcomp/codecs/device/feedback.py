"""The forms of error feedback on a device; see :mod:`.memories` and :mod:`.estimates` of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridcomp import arrays, wire
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device import block
from hybridcomp.codecs.device.driver import suffix
from hybridcomp.codecs.device.memory import MODULE, DeviceMemory, Keep, aligned_room, read
from hybridcomp.codecs.device.messages import Encoded, aligned, output_for
from hybridcomp.codecs.device.residuals import AcceleratedMemory, PlainMemory
from hybridcomp.codecs.device.states import Slots
from hybridcomp.codecs.feedback import estimates, memories
from hybridcomp.codecs.feedback import memory as host
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import HEADER_BYTES

if TYPE_CHECKING:
    from hybridcomp.codecs.feedback.error_feedback import ErrorFeedback, Key

_STATE = block.Form(8, memories.STATE_CODEC.block)  # format of loco's state
# Modules of kernels that memories launch beside the codec's own.
MODULES = (MODULE, _STATE.module)


class EstimateMemory(DeviceMemory):
    """The memory of ``ef21`` on a device.

    Attributes:
        sent: g, the estimate of this rank's array.
        total: the sum of all ranks' g, or of the other ranks' in the span that this rank owns; None until needed.
        known: the estimate of a reduction's result; None until needed.
    """

    name = "ef21"
    tracks = True
    keeps_later = True

    def __init__(self, form: Form, n: int, kind: DType, queue: Queue, slots: Slots) -> None:
        super().__init__(form, n, kind, queue, slots)
        self.sent = self._zeros(queue)
        self.total: DeviceArray | None = None
        self.known: DeviceArray | None = None
        # The next `sent` of each span, and whether it is not finite; the next `total` of each owned span.
        self._waiting: dict[tuple[int, int], tuple[DeviceArray, DeviceArray]] = {}
        self._summed: dict[tuple[int, int], DeviceArray] = {}
        self._own: Flat | None = None

    def begin(self, queue: Queue) -> int:
        self.settle(queue)
        return super().begin(queue)

    def correct(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        corrected = self._array(data.size, queue)
        self._add(queue, data, self.sent[span], corrected, subtract=True)
        return corrected

    def keep(
        self, corrected: DeviceArray, decoded: DeviceArray, queue: Queue, span: slice, weight: float = 1.0
    ) -> None:
        bad = queue.zero_words(1)
        self._add(queue, self._flat(decoded), self.sent[span], decoded, bad=bad)
        self._waiting[span.start, span.stop] = decoded, bad

    def own(self, codec: Codec, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        if self.total is None:
            self.total = self._zeros(queue)
        mine, total, found = self.sent[span], self.total[span], queue.zero_words(1)
        # If another rank owned this span before, the sum holds the estimate that this rank sent then.
        self._run(queue, self._of("look"), mine.size, mine, mine.size, found)
        self._run(queue, self._of("take_out"), mine.size, total, mine, mine.size, found)
        self._own = data
        return self._copy(total, queue)

    def encode_sum_first(
        self, codec: Codec, total: DeviceArray, out: DeviceArray, queue: Queue, span: slice, ranks: int
    ) -> tuple[Encoded, Keep | None]:
        own, self._own = self._own, None
        assert own is not None
        self._summed[span.start, span.stop] = self._copy(total, queue)
        self._add(queue, own, total, total)
        self._divide(total, ranks, queue)
        self._add(queue, self._flat(total), self._result(queue)[span], total, subtract=True)
        return self._write(codec, total, total.shape, out, queue), None

    def result(self, values: DeviceArray, queue: Queue, span: slice) -> None:
        known, bad = self._result(queue)[span], queue.zero_words(1)
        self._add(queue, self._flat(values), known, values, bad=bad)
        self._commit(known, values, queue, bad)
        self._settle((span.start, span.stop), queue, bad)

    def _result(self, queue: Queue) -> DeviceArray:
        if self.known is None:
            self.known = self._zeros(queue)
        return self.known

    def _copy(self, source: DeviceArray, queue: Queue) -> DeviceArray:
        copy = self._array(source.size, queue)
        queue.copy(copy, source)
        return copy

    def add(self, decoded: Flat, out: DeviceArray, queue: Queue) -> None:
        """Write the sum of all ranks' decoded messages and of their estimates until now to ``out``, and keep it."""
        self._queue = queue
        if self.total is None:
            self.total = self._zeros(queue)
        bad = queue.zero_words(1)
        self._add(queue, decoded, self.total, out, bad=bad)
        self._commit(self.total, out, queue, bad)
        self.settle(queue, bad)

    def settle(self, queue: Queue, bad: DeviceArray | None = None) -> None:
        """End a step whose messages have arrived everywhere, or, if ``bad`` is set, are used nowhere."""
        for span in list(self._waiting):
            self._settle(span, queue, bad)
        self._summed.clear()

    def _settle(self, span: tuple[int, int], queue: Queue, bad: DeviceArray | None) -> None:
        waiting = self._waiting.pop(span, None)
        if waiting is not None:
            fresh, own_bad = waiting
            self._commit(self.sent[slice(*span)], fresh, queue, own_bad, bad)
        total = self._summed.pop(span, None)
        if total is not None:
            assert self.total is not None
            self._commit(self.total[slice(*span)], total, queue, bad)

    def arrays(self) -> dict[str, host.Array]:
        self.settle(self._queue)
        saved = {"": self.sent, "total": self.total, "known": self.known}
        return {name: read(array, self._queue) for name, array in saved.items() if array is not None}

    def load(self, memory: estimates.EstimateMemory, queue: Queue) -> None:
        memory.settle()
        queue.write(self.sent, memory.sent)
        for name in ("total", "known"):
            values = getattr(memory, name)
            if values is not None:
                setattr(self, name, self._array(self.n, queue))
                queue.write(getattr(self, name), values)


class AverageMemory(DeviceMemory):
    """The memory of ``loco`` on a device.

    Attributes:
        sections: the state: scales and integers of an ``int8`` message.
    """

    name = "loco"
    apart = False  # a block of the state may lie in two spans

    def __init__(self, form: Form, n: int, kind: DType, queue: Queue, slots: Slots) -> None:
        super().__init__(form, n, kind, queue, slots)
        self._beta: float = form.options["beta"]
        self._reset_steps: int = form.options["reset_steps"]
        self._wide = kind is DType.FLOAT64
        self.sections = queue.zeros(_STATE.scales(n, kind) + n)

    def begin(self, queue: Queue) -> int:
        step = super().begin(queue)
        if step and step % self._reset_steps == 0:
            queue.fill(self.sections)
        return step

    def _window(self, span: slice) -> slice:
        """Return the range of the blocks that a span touches."""
        first = span.start - span.start % _STATE.block
        return slice(first, min(self.n, -(-span.stop // _STATE.block) * _STATE.block))

    def _parts(self, window: slice) -> tuple[DeviceArray, DeviceArray]:
        """Return scales and integers of a window."""
        scales = _STATE.scales(self.n, self.kind)
        begin = _STATE.scales(window.start, self.kind)
        end = begin + _STATE.scales(window.stop - window.start, self.kind)
        return self.sections[begin:end], self.sections[scales + window.start : scales + window.stop]

    def _error(self, window: slice, queue: Queue) -> DeviceArray:
        error = self._array(window.stop - window.start, queue)
        block.decode_sections(_STATE, *self._parts(window), self._wide, error, self.kind, False, queue)
        return error

    def correct(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        window = self._window(span)
        corrected, at = self._array(data.size, queue), span.start - window.start
        self._add(queue, data, self._error(window, queue)[at : at + data.size], corrected)
        return corrected

    def keep(
        self, corrected: DeviceArray, decoded: DeviceArray, queue: Queue, span: slice, weight: float = 1.0
    ) -> None:
        window, n, bad = self._window(span), corrected.size, queue.zero_words(1)
        error, at = self._error(window, queue), span.start - window.start
        numbers = [self._number(value) for value in (weight, self._beta, 1 - self._beta)]
        mine = error[at : at + n]
        self._run(queue, self._of("average"), n, corrected, decoded, mine, n, *numbers, bad)
        scales, integers = self._parts(window)
        fresh_scales, fresh_integers = queue.empty(scales.nbytes), queue.empty(integers.nbytes)
        block.encode_sections(_STATE, error, self.kind, None, fresh_scales, fresh_integers, queue)
        self._commit(scales, fresh_scales, queue, bad)
        self._commit(integers, fresh_integers, queue, bad)

    def _encode_fused(
        self, codec: Codec, data: Flat, out: DeviceArray, queue: Queue, span: slice
    ) -> Encoded | None:
        if codec.integer_blocks is None or self._window(span) != span:
            return None
        n, form, bad = data.size, block.Form(*codec.integer_blocks), queue.zero_words(1)
        state = self._parts(span)
        fresh = queue.empty(state[0].nbytes), queue.empty(state[1].nbytes)
        buffer = aligned_room(codec, n, self.kind, out, queue)
        beta = self._number(self._beta), self._number(1 - self._beta)
        size = block.encode_average(
            form, data.data, data.dtype, state, fresh, beta, bad, buffer[HEADER_BYTES:], queue
        )
        if size is None:
            return None
        for part, new in zip(state, fresh, strict=True):
            self._commit(part, new, queue, bad)
        return self._sealed(codec, buffer, n, size, out, queue)

    def arrays(self) -> dict[str, host.Array]:
        codec = memories.STATE_CODEC
        payload = _STATE.prefix() + read(self.sections, self._queue).tobytes()
        message = np.empty(codec.bound(self.n, self.kind), np.uint8)
        message[HEADER_BYTES:] = np.frombuffer(payload, np.uint8)
        wire.seal(
            message,
            codec.wire_id,
            codec.params_hash,
            dtype=self.kind,
            count=self.n,
            payload=len(payload),
        )
        return {"": message}

    def load(self, memory: memories.AverageMemory, queue: Queue) -> None:
        queue.write(self.sections, memory.message[HEADER_BYTES + _STATE.prefix_bytes :])


class MomentumMemory(DeviceMemory):
    """The memory of ``dgc`` on a device.

    Attributes:
        velocity: u, the velocity.
        sum: v, what has not been sent yet.
    """

    name = "dgc"

    def __init__(self, form: Form, n: int, kind: DType, queue: Queue, slots: Slots) -> None:
        super().__init__(form, n, kind, queue, slots)
        self._momentum: float = form.options["momentum"]
        self.velocity = self._zeros(queue)
        self.sum = self._zeros(queue)
        self._moved: DeviceArray | None = None

    def correct(self, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        n, corrected, moved = data.size, self._array(data.size, queue), self._array(data.size, queue)
        velocity, total, momentum = self.velocity[span], self.sum[span], self._number(self._momentum)
        kernel = f"move_{suffix(data.dtype)}"
        self._run(queue, kernel, n, data.data, velocity, total, moved, corrected, n, momentum)
        self._moved = moved
        return corrected

    def keep(
        self, corrected: DeviceArray, decoded: DeviceArray, queue: Queue, span: slice, weight: float = 1.0
    ) -> None:
        moved, self._moved = self._moved, None
        assert moved is not None
        n, bad = corrected.size, queue.zero_words(1)
        self._run(queue, self._of("mask"), n, corrected, decoded, moved, n, bad)
        self._commit(self.sum[span], decoded, queue, bad)
        self._commit(self.velocity[span], moved, queue, bad)

    def own(self, codec: Codec, data: Flat, queue: Queue, span: slice) -> DeviceArray:
        message = queue.empty(codec.bound(data.size, self.kind))
        encoded = self.encode(codec, data, message, queue, span)
        return self._decoded(codec, encoded, data.size, queue)

    def encode_sum_first(
        self, codec: Codec, total: DeviceArray, out: DeviceArray, queue: Queue, span: slice, ranks: int
    ) -> tuple[Encoded, Keep | None]:
        self._divide(total, ranks, queue)
        encoded = self._write(codec, total, total.shape, out, queue)
        n, bad, mine = total.size, queue.zero_words(1), self.sum[span]
        lost = self._decoded(codec, encoded, n, queue)
        # Compute the message's error, then v with it added: neither is kept if it is not finite.
        self._run(queue, self._of("lose"), n, total, lost, lost, None, n, self._number(ranks), bad)
        self._add(queue, self._flat(mine), lost, lost, bad=bad)
        self._commit(mine, lost, queue, bad)
        return encoded, None

    def arrays(self) -> dict[str, host.Array]:
        return {"": read(self.sum, self._queue), "velocity": read(self.velocity, self._queue)}

    def load(self, memory: memories.MomentumMemory, queue: Queue) -> None:
        queue.write(self.sum, memory.sum)
        queue.write(self.velocity, memory.velocity)


MEMORIES: dict[str, type[DeviceMemory]] = {
    cls.name: cls for cls in (PlainMemory, EstimateMemory, AverageMemory, MomentumMemory, AcceleratedMemory)
}


def encode_with_feedback(feedback: ErrorFeedback, codec: Codec, x: Any, key: Key, out: Any) -> Any:
    """Encode a device array as :meth:`ErrorFeedback.encode` does, on the stream that its library is using."""
    src = arrays.flatten(x, device=True)
    queue = Queue(src.data.runtime, src.data.runtime.current_stream(x))
    memory = feedback.device_memory(key, src.size, src.dtype, queue)
    at = codec.at_step(memory.begin(queue))
    out, room = output_for(at.bound(src.size, memory.kind), x, out, queue)
    data = aligned(queue, src.data, src.dtype.component_bytes)
    encoded = memory.encode(at, src._replace(data=data), room, queue)
    return out[: encoded.nbytes(queue)]


def accumulate(feedback: ErrorFeedback, decoded_sum: Any, key: Key, form: Form) -> Any:
    """Add a device array as :meth:`ErrorFeedback.accumulate` does under ``ef21``."""
    flat = arrays.flatten(decoded_sum, device=True)
    queue = Queue(flat.data.runtime, flat.data.runtime.current_stream(decoded_sum))
    memory = feedback.device_memory(key, flat.size, flat.dtype, queue, form)
    assert isinstance(memory, EstimateMemory)
    out = queue.runtime.new_array(flat.size, memory.kind, decoded_sum)
    target = arrays.flatten(out, writable=True, device=True).data
    data = aligned(queue, flat.data, flat.dtype.component_bytes)
    memory.add(flat._replace(data=data), target, queue)
    return out if len(flat.shape) == 1 else out.reshape(flat.shape)
