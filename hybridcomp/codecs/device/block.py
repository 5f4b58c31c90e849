"""``int8``, ``int4``, ``int2`` on a device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hybridcomp.arrays import DType
from hybridcomp.codecs import quantize
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import Driver, suffix
from hybridcomp.codecs.device.states import Slot
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

AFFINE, HADAMARD, STOCHASTIC = 1, 2, 4  # flags of kernels; the last is not in messages
THREADS, FEW_THREADS = 256, 128
WAVES = 1024  # blocks of a grid for each multiprocessor: a thread seldom strides
_TILE = 2048  # elements of a block of threads that transforms
_LONG = 2048  # blocks over this length are encoded by a block of threads each
_LONGEST_LANES = 1024  # longest block of the fast encoder
_PEERS = 16  # messages that are added at once


@dataclass(frozen=True, slots=True)
class Form:
    """The format on which encoder and decoder must agree; a payload's prefix.

    Attributes:
        bits: bits of an integer: 8, 4 or 2.
        block: elements that share a scale.
        flags: any of :data:`AFFINE`, :data:`HADAMARD` and, for encoders, :data:`STOCHASTIC`.
        seed: seed of the random numbers.
    """

    bits: int
    block: int
    flags: int = 0
    seed: int = 0

    @property
    def module(self) -> str:
        """Return the name of the module whose kernels know this width."""
        return f"block{self.bits}"

    @property
    def prefix_bytes(self) -> int:
        """Return the number of bytes before the scales."""
        return 16 if self.flags & HADAMARD else 8

    @property
    def fast(self) -> bool:
        """Tell whether decoders take sixteen elements at a time."""
        return self.flags == 0 and self.block >= 32 and not self.block & (self.block - 1)

    def prefix(self) -> bytes:
        """Return the payload's first bytes."""
        head = struct.pack("<II", self.block, self.flags & (AFFINE | HADAMARD))
        return head + struct.pack("<Q", self.seed) if self.flags & HADAMARD else head

    def scales(self, n: int, dtype: DType) -> int:
        """Return the number of bytes of the scales and offsets of ``n`` elements."""
        each = dtype.accumulator.itemsize * (2 if self.flags & AFFINE else 1)
        return -(-n // self.block) * each

    def packed(self, n: int) -> int:
        """Return the number of bytes of the integers of ``n`` elements."""
        full, rest = divmod(n, self.block)
        return full * (self.block * self.bits // 8) + -(-rest * self.bits // 8)

    def payload(self, n: int, dtype: DType) -> int:
        """Return the number of bytes of the payload of ``n`` elements."""
        return self.prefix_bytes + self.scales(n, dtype) + self.packed(n)

    def encoder(self) -> tuple[str, int, int]:
        """Return the kernel that encodes plain elements.

        The result is its name less the dtype, and the elements and threads of a thread block.
        """
        if self.flags & HADAMARD:
            return "encode_hadamard", _TILE, THREADS
        if self.fast and self.block == _LONGEST_LANES:
            return "encode_q8", 32 * FEW_THREADS, FEW_THREADS
        if self.fast and self.block < _LONGEST_LANES:
            return "encode_q4", 16 * THREADS, THREADS
        if self.block > _LONG:
            return "encode_long", self.block, THREADS
        return "encode_any", 8 * THREADS, THREADS

    def feedback_encoder(self, dtype: DType) -> tuple[str, int, int]:
        """Return the kernel that encodes with error feedback, as :meth:`encoder` returns that for plain elements."""
        if self.fast and self.block <= _LONGEST_LANES and dtype is not DType.FLOAT64:
            quads = 8 if self.block == _LONGEST_LANES else 4
            return f"feedback_q{quads}", 4 * quads * FEW_THREADS, FEW_THREADS
        if self.block > _LONG:
            return "feedback_long", self.block, THREADS
        return "feedback_any", 8 * THREADS, THREADS


def form_of(bits: int, head: bytes) -> Form:
    """Return the format of a checked message."""
    block, flags = struct.unpack_from("<II", head)
    seed = struct.unpack_from("<Q", head, 8)[0] if flags & HADAMARD else 0
    return Form(bits, block, flags, seed)


def form_of_codec(codec: Codec) -> Form:
    """Return the format that a codec encodes to."""
    assert isinstance(codec, quantize.BlockCodec)
    flags = (0 if codec.symmetric else AFFINE) | (HADAMARD if codec.hadamard else 0)
    flags |= STOCHASTIC if codec.rounding == "stochastic" else 0
    return Form(codec.bits, codec.block, flags, codec.seed)


def encode_sections(
    form: Form,
    src: DeviceArray,
    dtype: DType,
    prefix: DeviceArray | None,
    scales: DeviceArray,
    packed: DeviceArray,
    queue: Queue,
) -> None:
    """Write the scales, the integers and, unless it is None, the prefix of ``src``."""
    kernel, each, threads = form.encoder()
    blocks = max(1, queue.blocks(src.size, each, WAVES))
    name = f"{kernel}_{suffix(dtype)}"
    if kernel in ("encode_q4", "encode_q8"):
        args: tuple[int, ...] = (form.block,)
    else:
        args = (form.block, form.flags, form.seed)
    queue.launch(form.module, name, blocks, threads, src, src.size, *args, prefix, scales, packed)


def encode_feedback(
    form: Form,
    src: DeviceArray,
    dtype: DType,
    state: Slot,
    start: int,
    fresh: Slot | DeviceArray,
    bad: DeviceArray,
    payload: DeviceArray,
    queue: Queue,
) -> int:
    """Write the payload of ``src`` plus a residual, and the new residual; return the payload's bytes.

    Args:
        form: a plain form, without flags.
        src: elements to encode.
        dtype: dtype of ``src``.
        state: slot of the residual.
        start: index of the residual's first element that is added.
        fresh: memory for the new residual, the error of the payload.
        bad: word on the device, set if the new residual is not finite.
        payload: payload of the message, whose dtype is ``dtype.accumulator``.
        queue: queue to launch on.
    """
    kernel, each, threads = form.feedback_encoder(dtype)
    scales = payload[form.prefix_bytes :]
    packed = scales[form.scales(src.size, dtype) :]
    slot = fresh.word if isinstance(fresh, Slot) else None
    queue.launch(
        form.module,
        f"{kernel}_{suffix(dtype)}",
        max(1, queue.blocks(src.size, each, WAVES)),
        threads,
        src,
        src.size,
        form.block,
        state.word,
        start,
        None if isinstance(fresh, Slot) else fresh,
        slot,
        bad,
        payload,
        scales,
        packed,
    )
    return form.payload(src.size, dtype)


def encode_average(
    form: Form,
    src: DeviceArray,
    dtype: DType,
    state: tuple[DeviceArray, DeviceArray],
    fresh: tuple[DeviceArray, DeviceArray],
    beta: tuple[int, int],
    bad: DeviceArray,
    payload: DeviceArray,
    queue: Queue,
) -> int | None:
    """Encode as :func:`encode_feedback` does, for ``loco``; return None where there is no kernel for it.

    Args:
        form: a plain form, without flags.
        src: elements to encode.
        dtype: dtype of ``src``.
        state: scales and integers of the moving average, blocks of 128.
        fresh: memory for the new scales and integers.
        beta: the bits of beta and of 1 - beta.
        bad: word on the device, set if the state is not finite.
        payload: payload of the message.
        queue: queue to launch on.
    """
    if not form.fast or form.block > 128 or dtype is DType.FLOAT64:
        return None
    scales = payload[form.prefix_bytes :]
    packed = scales[form.scales(src.size, dtype) :]
    blocks = max(1, queue.blocks(src.size, 16 * FEW_THREADS, WAVES))
    args = (src, src.size, form.block, *state, *fresh, *beta, bad, payload, scales, packed)
    queue.launch(form.module, f"feedback_average_{suffix(dtype)}", blocks, FEW_THREADS, *args)
    return form.payload(src.size, dtype)


def decode_sections(
    form: Form,
    scales: DeviceArray,
    packed: DeviceArray,
    wide: bool,
    out: DeviceArray,
    dtype: DType,
    add: bool,
    queue: Queue,
) -> None:
    """Write or add the values of scales and integers (of float64 if ``wide``) to ``out``, all of it."""
    kinds = f"{'f64' if wide else 'f32'}_{suffix(dtype)}{'_add' if add else ''}"
    args: tuple[int, ...] = ()
    if form.flags & HADAMARD:
        kernel, each, args = "decode_hadamard", _TILE, (form.flags, form.seed)
    elif form.fast:
        kernel, each = "decode_plain", 16 * THREADS
    else:
        kernel, each, args = "decode_any", 4 * THREADS, (form.flags,)
    n, name = out.size, f"{kernel}_{kinds}"
    blocks = queue.blocks(n, each, WAVES)
    queue.launch(form.module, name, blocks, THREADS, scales, packed, n, form.block, *args, out, queue.status)


class _BlockDriver(Driver):
    """The driver of blocks of integers."""

    bits: ClassVar[int]

    def modules(self) -> tuple[str, ...]:
        return (f"block{self.bits}",)

    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        form = form_of_codec(codec)
        scales = payload[form.prefix_bytes :]
        packed = scales[form.scales(src.size, dtype) :]
        encode_sections(form, src, dtype, payload, scales, packed, queue)
        return form.payload(src.size, dtype)

    def decode(
        self,
        header: Header,
        head: bytes,
        payload: DeviceArray,
        out: DeviceArray,
        dtype: DType,
        add: bool,
        queue: Queue,
    ) -> None:
        form = form_of(self.bits, head)
        scales = payload[form.prefix_bytes :]
        packed = scales[form.scales(header.count, header.dtype) :]
        wide = header.dtype is DType.FLOAT64
        decode_sections(form, scales, packed, wide, out, dtype, add, queue)

    def head(self, codec: Codec) -> bytes:
        return form_of_codec(codec).prefix()

    def decode_sum(
        self,
        headers: Sequence[Header],
        heads: Sequence[bytes],
        payloads: Sequence[DeviceArray],
        acc: DeviceArray,
        dtype: DType,
        queue: Queue,
    ) -> None:
        form = form_of(self.bits, heads[0]) if headers else Form(self.bits, 8)
        alike = all(h.dtype.accumulator is dtype for h in headers) and len({h[:8] for h in heads}) == 1
        if not form.fast or not alike:
            super().decode_sum(headers, heads, payloads, acc, dtype, queue)
            return
        blocks = queue.blocks(acc.size, 16 * THREADS, WAVES)
        for at in range(0, len(payloads), _PEERS):
            scales = [payload[form.prefix_bytes :] for payload in payloads[at : at + _PEERS]]
            messages = [*scales, *[None] * (_PEERS - len(scales))]
            name = f"decode_sum_{suffix(dtype)}"
            # The block is a multiple of 32 here: the number of messages fits below it.
            count = form.block + len(scales)
            queue.launch(form.module, name, blocks, THREADS, acc, acc.size, count, queue.status, *messages)


class Int8Driver(_BlockDriver):
    """The driver of ``int8``."""

    bits = 8


class Int4Driver(_BlockDriver):
    """The driver of ``int4``."""

    bits = 4


class Int2Driver(_BlockDriver):
    """The driver of ``int2``."""

    bits = 2
