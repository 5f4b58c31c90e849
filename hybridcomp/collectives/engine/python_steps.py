"""Compute in Python the steps of schedules whose codec has no native encoder, or none for such sums.

The compiled engine runs the schedule and checks messages that arrive. It puts aside the steps that need the codec; the
thread that polls the operation takes each, computes it here, and answers with the bytes of the message that it made.
Steps work on the caller's arrays and on the engine's blocks, which are used again once nothing refers to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridcomp.arrays import ByteArray, DType, Flat, narrow
from hybridcomp.codecs import Codec, Memory
from hybridcomp.codecs.sparse.base import SparseCodec
from hybridcomp.codecs.steps import summed, trimmed
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.native import kernels
from hybridcomp.schedules.schedule import Buffer, Kind, Schedule, Slot, Span, Step

# Time for which the engine computes after an answer, so that the steps that follow from it can be asked for.
_ANSWER_SECONDS = 100e-6


class PythonProgram(NamedTuple):
    """Compiled schedule with steps for Python.

    Attributes:
        handle: the compiled module's ``EngineProgram``.
        schedule: schedule that it was made from.
    """

    handle: Any
    schedule: Schedule


def needs_python(codec: Codec, dtype: DType, *, sums: bool) -> bool:
    """Tell whether Python encodes and decodes the messages of an operation."""
    # Compiled code does not widen the values of sparse codecs.
    unwidened = sums and isinstance(codec, SparseCodec) and dtype is not dtype.accumulator
    return codec.encoder is None or unwidened


def message_bounds(schedule: Schedule, codec: Codec, dtype: DType) -> array[int]:
    """Return the bytes of the longest message of each slot."""
    known = {slot: codec.bound(slot.count, _kind(slot, dtype)) for slot in set(schedule.slots)}
    return array("Q", [known[slot] for slot in schedule.slots])


def at_step(program: PythonProgram | Any, codec: Codec, dtype: DType) -> Any:
    """Return a program's ``EngineProgram`` with the codec of a training step, which may differ between steps.

    Raises:
        ValueError: the program's steps need an encoder, and this codec has none.
    """
    if not isinstance(program, PythonProgram):
        return kernels().engine_with_codec(program, codec.encoder, codec.wire_id, codec.params_hash, None)
    bounds = message_bounds(program.schedule, codec, dtype)
    return kernels().engine_with_codec(program.handle, None, codec.wire_id, codec.params_hash, bounds)


class PythonSteps:
    """Steps of one run that Python computes, in the polls of the operation.

    Args:
        schedule: schedule of the run's program.
        send, recv: the caller's arrays; None where the schedule uses none.
        carrier: carrier of the operation, with the codec of the memory's step.
        memory: error-feedback memory, whose step has begun; None for none.
    """

    def __init__(
        self,
        schedule: Schedule,
        send: Flat | None,
        recv: Flat | None,
        carrier: Carrier,
        memory: Memory | None,
    ) -> None:
        self._schedule = schedule
        self._arrays = {Buffer.SEND: send, Buffer.RECV: recv}
        self._carrier = carrier
        self._memory = memory
        self._run: Any = None
        self._error: BaseException | None = None

    def until_ended(self, run: Any) -> Steps:
        """Compute the steps that the run asks for, until it has ended.

        Raises:
            Exception: the error of a step.
        """
        self._run = run
        if not run.done():
            yield Pending([], [], poll=self.poll, run=run)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def poll(self) -> bool:
        """Compute the next step; return whether there was one. An error in it ends the run, and then the wait."""
        taken = kernels().engine_take(self._run)
        if taken is None:
            return False
        try:
            index = taken.pop(0)
            nbytes = self._compute(self._schedule.steps[index], *taken)
            taken.clear()  # before the engine gives the memory to others
            kernels().engine_answer(self._run, index, nbytes, _ANSWER_SECONDS)
        except BaseException as error:  # the operation's steps raise it again
            self._error = error
            self._run.abandon()
        return True

    def _compute(self, step: Step, out: ByteArray, scratch: ByteArray, *messages: ByteArray) -> int:
        """Compute a step in the engine's memory, valid for the call.

        Args:
            step: step of the schedule.
            out: uint8 room for the message that the step makes.
            scratch: scratch memory, if the step uses it.
            messages: messages that the step reads.

        Returns:
            Bytes of the message that the step has made, 0 if it makes none.
        """
        own, result = self._span(step.span, scratch), self._span(step.out, scratch)
        call, codec = self._carrier.call, self._carrier.codec
        if step.kind is Kind.ENCODE:
            assert own is not None
            with call.encoding():
                if step.memory < 0:
                    return codec.encode_flat(own, out)
                return self._remembered.encode(codec, own, out, step.part)
        if step.kind is Kind.DECODE:
            assert result is not None
            with call.decoding():
                self._take(messages[0], step, result)
            return 0
        assert step.kind in (Kind.SUM, Kind.SUM_ENCODE), (
            f"the engine computes a step of kind {step.kind.name}"
        )
        raws = self._addends(step, messages)
        if step.memory >= 0:
            return self._sum_with_feedback(step, raws, own, out, result)
        with call.decoding():
            if step.kind is Kind.SUM:
                assert result is not None
                self._sum(step, raws, own, result)
                return 0
            return self._sum_encode(step, raws, own, out, result)

    def _sum(self, step: Step, raws: list[ByteArray], own: Flat | None, result: Flat) -> None:
        carrier, codec, ranks = self._carrier, self._carrier.codec, self._divisor(step)
        if own is None:
            wide = result.dtype.accumulator
            acc = result.data if result.dtype is wide else None
            carrier.store(self._total(step, raws, acc), result.data, ranks)
        elif own.dtype is result.dtype:
            codec.sum_into(own, raws, ranks, result.data, stream=self._stream(step))
        else:
            result.data[:] = summed(own, raws, ranks, result.dtype)

    def _total(self, step: Step, raws: list[ByteArray], acc: Array | None = None) -> Array:
        """Add messages to zeros, in ``acc`` if there is one."""
        total = np.empty(step.count, self._carrier.dtype.accumulator.storage) if acc is None else acc
        self._carrier.codec.decode_sum_flat(
            [trimmed(raw, step.count, self._carrier.dtype) for raw in raws], total
        )
        return total

    def _sum_encode(
        self, step: Step, raws: list[ByteArray], own: Flat | None, out: ByteArray, result: Flat | None
    ) -> int:
        codec, ranks, stream = self._carrier.codec, self._divisor(step), self._stream(step)
        kind = _kind(self._schedule.slots[step.slot], self._carrier.dtype)
        if own is None:
            total = self._total(step, raws)
            own, raws = Flat(total, self._carrier.dtype.accumulator, total.shape, True, False), []
        if result is None or result.dtype is own.dtype:
            values = None if result is None else result.data
            return codec.sum_encode(own, raws, ranks, kind, out, result=values, stream=stream)
        nbytes = codec.sum_encode(own, raws, ranks, kind, out)
        codec.decode_many([out[:nbytes]], [result.data], result.dtype, stream=stream)
        return nbytes

    def _sum_with_feedback(
        self, step: Step, raws: list[ByteArray], own: Flat | None, out: ByteArray, result: Flat | None
    ) -> int:
        carrier, memory, codec = self._carrier, self._remembered, self._carrier.codec
        ranks, part = self._divisor(step), step.part
        with carrier.call.decoding():
            total = self._total(step, raws) if own is None else memory.summed(codec, own, raws, part)
            if step.kind is Kind.SUM:
                assert result is not None
                carrier.store(total, result.data, ranks)
                return 0
        with carrier.call.encoding():
            nbytes = memory.encode_sum(codec, total, out, part, ranks)
        if result is not None:
            with carrier.call.decoding():
                self._take(out[:nbytes], step, result)
        return nbytes

    def _take(self, raw: ByteArray, step: Step, result: Flat) -> None:
        """Write the values of a checked message to the result, and to the memory where the step has one."""
        codec, memory = self._carrier.codec, self._memory
        if step.memory < 0 or memory is None or not memory.tracks:
            codec.decode_many([raw], [result.data], result.dtype, stream=self._stream(step))
            return
        kind = result.dtype.accumulator
        values = result.data if result.dtype is kind else np.empty(result.size, kind.storage)
        codec.decode_flat(*trimmed(raw, result.size, kind), values, kind)
        memory.result(values, step.part)
        if values is not result.data:
            result.data[:] = narrow(values, result.dtype)

    def _addends(self, step: Step, messages: Sequence[ByteArray]) -> list[ByteArray]:
        """Return the messages that a step sums; plain elements become messages, as codecs take them."""
        raws = []
        for at, message in zip(step.slots, messages, strict=True):
            slot = self._schedule.slots[at]
            if not slot.plain:
                raws.append(message)
                continue
            kind = _kind(slot, self._carrier.dtype)
            values = message.view(kind.storage)
            wrapped = np.empty(NONE.bound(values.size, kind), np.uint8)
            NONE.encode_flat(Flat(values, kind, values.shape, True, False), wrapped)
            raws.append(wrapped)
        return raws

    @property
    def _remembered(self) -> Memory:
        assert self._memory is not None
        return self._memory

    def _divisor(self, step: Step) -> int:
        return self._schedule.ranks if step.divide else 1

    def _stream(self, step: Step) -> bool:
        return self._carrier.stream and step.out is not None and step.out.buffer is Buffer.RECV

    def _span(self, span: Span | None, scratch: ByteArray) -> Flat | None:
        if span is None:
            return None
        if span.buffer is Buffer.SCRATCH:
            kind = self._carrier.dtype.accumulator
            data = scratch.view(kind.storage)[span.start : span.stop]
        else:
            array = self._arrays[span.buffer]
            assert array is not None
            data, kind = array.data[span.start : span.stop], array.dtype
        return Flat(data, kind, data.shape, True, False)


def _kind(slot: Slot, dtype: DType) -> DType:
    return dtype.accumulator if slot.wide else dtype
