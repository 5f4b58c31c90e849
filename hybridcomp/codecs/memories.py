"""The forms of error feedback that keep an error. C is encode and decode.

``ef``: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., arXiv:1901.09847. ::

    c = x + e;  send C(c);  e = c - C(c)

``loco``: Xie et al., arXiv:2407.04480. The error is a moving average, kept in 8 bits (the payload of an ``int8``
message, blocks of 128), and forgotten every ``reset_steps`` steps of its key. ::

    c = x + e;  send C(c);  e = beta e + (1 - beta) (c - C(c))

What a step loses is sent in the steps after it, in shares (1 - beta) beta^k that add up to one: what was meant less
what was sent is e / (1 - beta), where ``ef`` has e. Lost for good is, both over (1 - beta), what the 8 bits round
off at each step (half a scale at most: 1/254 of the largest error of the block) and what a reset forgets. The mean of
a reduction divides by all ranks of its communicator.

``dgc``: Lin et al., "Deep Gradient Compression", arXiv:1712.01887: momentum correction and momentum factor masking.
The optimizer's own momentum must be off: this is it. ::

    u = momentum u + x;  v = v + u;  send C(v);  v = v - C(v);  u = 0 where C(v) is not 0
"""

from __future__ import annotations

import numpy as np

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType, Flat, as_dtype
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.forms import Form
from hybridcomp.codecs.memory import Array, Memory, Scratch
from hybridcomp.codecs.quantize import Int8Codec
from hybridcomp.codecs.sparse import SparseCodec
from hybridcomp.errors import WireError

_LONGEST = 8192  # block of a codec, for the kernels that encode with feedback in one pass
STATE_CODEC = Int8Codec(block=128)  # of loco's state
_SECTIONS = wire.HEADER_BYTES + 8  # where its scales begin


def _blocks(codec: Codec) -> tuple[int, int] | None:
    """Bits and block of a codec that the one-pass kernels know."""
    found = codec.integer_blocks
    return found if found is not None and found[1] <= _LONGEST else None


def main_array(arrays: dict[str, Array], others: tuple[str, ...] = ()) -> tuple[Array, DType]:
    """The main array and its dtype; ValueError unless all are float32, or all float64, and of one size."""
    if "" not in arrays or not set(arrays) <= {"", *others}:
        raise ValueError(f"it has the arrays {sorted(arrays)}, not {sorted(['', *others])}")
    main = arrays[""]
    kind = as_dtype(main.dtype)
    if kind not in (DType.FLOAT32, DType.FLOAT64):
        raise ValueError(f"it is {kind.label}, not float32 or float64")
    for name, array in arrays.items():
        if array.size != main.size or array.dtype != main.dtype:
            raise ValueError(
                f"its array {name!r} is {array.dtype}[{array.size}], not {main.dtype}[{main.size}]"
            )
    return main, kind


class PlainMemory(Memory):
    """``ef``.

    Attributes:
        error: what has not been sent yet.
    """

    name = "ef"

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        super().__init__(form, n, kind, scratch)
        self.error: Array = np.zeros(n, kind.storage)

    def correct(self, data: Flat, span: slice) -> Array:
        corrected = self._take(data.size)
        self._kernels.feedback_add(data.data, data.dtype, self.error[span], corrected, False)
        return corrected

    def keep(self, corrected: Array, decoded: Array, span: slice, weight: float = 1.0) -> None:
        finite = self._kernels.feedback_lose(corrected, decoded, decoded, self._wide, weight)
        self._scratch.give(corrected)
        self._take_over(decoded, span, finite)

    def _take_over(self, fresh: Array, span: slice, finite: bool) -> None:
        if finite:
            self.error = self._replaced(self.error, fresh, span)
        else:
            self._scratch.give(fresh)

    def _encode_at_once(
        self, codec: Codec, data: Flat, out: ByteArray, span: slice, ranks: int = 1
    ) -> int | None:
        blocks, kernels = _blocks(codec), self._kernels
        encoder = codec.encoder if isinstance(codec, SparseCodec) else None
        if blocks is None and encoder is None:
            return None
        error = self.error[span]
        # What stays finite for sure is done where the state lies; a whole array, which no cache may hold, is read
        # once, and the quantizers' goes to one that takes the state's place.
        modest = (blocks is None or error.size < self.n) and kernels.feedback_modest(
            data.data, data.dtype, error
        )
        if blocks is None:
            if not modest:
                return None
            return int(kernels.feedback_encode_sparse(encoder, data.data, data.dtype, error, ranks, out))
        lost = error if modest else self._take(data.size)
        nbytes, finite = kernels.feedback_encode(
            data.data, data.dtype, error, lost, *blocks, codec.wire_id, codec.params_hash, out, ranks
        )
        if not modest:
            self._take_over(lost, span, finite)
        return int(nbytes)

    def encode_sum(self, codec: Codec, total: Array, out: ByteArray, span: slice, ranks: int = 1) -> int:
        nbytes = self._encode_at_once(codec, self._flat(total), out, span, ranks)
        if nbytes is None:
            return super().encode_sum(codec, total, out, span, ranks)
        self._scratch.give(total)
        return nbytes

    def arrays(self) -> dict[str, Array]:
        return {"": self.error.copy()}

    @classmethod
    def restore(cls, form: Form, arrays: dict[str, Array], scratch: Scratch) -> PlainMemory:
        main, kind = main_array(arrays)
        memory = cls(form, 0, kind, scratch)
        memory.n, memory.error = main.size, main.copy()
        return memory


class AverageMemory(Memory):
    """``loco``. The 8 bits lose at most half a scale of their block, 1/254 of its largest error, at each step.

    Attributes:
        message: the state, an ``int8`` message but for its header.
    """

    name = "loco"

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        super().__init__(form, n, kind, scratch)
        self._beta: float = form.options["beta"]
        self._reset_steps: int = form.options["reset_steps"]
        self.message: ByteArray = np.zeros(STATE_CODEC.bound(n, kind), np.uint8)
        self.message[wire.HEADER_BYTES : _SECTIONS] = np.array([STATE_CODEC.block, 0], "<u4").view(np.uint8)

    def begin(self) -> int:
        step = super().begin()
        if step and step % self._reset_steps == 0:
            self.message[_SECTIONS:] = 0
        return step

    @property
    def error(self) -> Array:
        """A copy of the state in :attr:`kind`."""
        self._seal()
        values = np.empty(self.n, self.kind.storage)
        STATE_CODEC.decode_flat(self.message, wire.peek(self.message), values, self.kind)
        return values

    def correct(self, data: Flat, span: slice) -> Array:
        corrected = self._take(data.size)
        self._kernels.average_correct(
            data.data, data.dtype, self.message[_SECTIONS:], self.n, span.start, corrected
        )
        return corrected

    def keep(self, corrected: Array, decoded: Array, span: slice, weight: float = 1.0) -> None:
        fresh = self._fresh(span)
        sections = self.message[_SECTIONS:]
        self._kernels.average_keep(
            corrected, decoded, self._wide, sections, self.n, span.start, fresh, weight, self._beta
        )
        for array in (corrected, decoded, fresh):
            self._scratch.give(array)

    def _encode_at_once(self, codec: Codec, data: Flat, out: ByteArray, span: slice) -> int | None:
        blocks = _blocks(codec)
        # The span, and the kernel's tiles of about 256 elements and whole blocks of the codec, must be whole blocks
        # of the state too.
        whole = not span.start % 128 and (not span.stop % 128 or span.stop == self.n)
        if blocks is None or not whole or (blocks[1] % 128 and 128 % blocks[1]):
            return None
        fresh = self._fresh(span)
        nbytes, _ = self._kernels.average_encode(
            data.data,
            data.dtype,
            self.message[_SECTIONS:],
            self.n,
            span.start,
            fresh,
            self._beta,
            *blocks,
            codec.wire_id,
            codec.params_hash,
            out,
        )
        self._scratch.give(fresh)
        return int(nbytes)

    def _fresh(self, span: slice) -> Array:
        nbytes = self._kernels.average_fresh_bytes(span.start, span.stop - span.start, self._wide)
        return self._scratch.take(nbytes, np.uint8)

    def _seal(self) -> None:
        payload = self.message.size - wire.HEADER_BYTES
        wire.seal(
            self.message,
            STATE_CODEC.wire_id,
            STATE_CODEC.params_hash,
            dtype=self.kind,
            count=self.n,
            payload=payload,
        )

    def arrays(self) -> dict[str, Array]:
        self._seal()
        return {"": self.message.copy()}

    @classmethod
    def restore(cls, form: Form, arrays: dict[str, Array], scratch: Scratch) -> AverageMemory:
        if set(arrays) != {""} or arrays[""].dtype != np.uint8:
            raise ValueError("it is not one int8 message")
        try:
            raw, header = wire.open_message(arrays[""])
            STATE_CODEC.check_payload(raw, header)
        except WireError as error:
            raise ValueError(str(error)) from error
        mine = (STATE_CODEC.wire_id, STATE_CODEC.params_hash)
        if (header.codec, header.params) != mine or header.dtype.accumulator is not header.dtype:
            raise ValueError(f"it is no message of {STATE_CODEC.spec!r}")
        memory = cls(form, 0, header.dtype, scratch)
        memory.n, memory.message = header.count, raw.copy()
        return memory


class MomentumMemory(Memory):
    """``dgc``. In a reduction a rank treats its own shard as it treats the others': what it adds to the sum is C(v),
    so that all ranks weigh alike. What the sum's own message loses goes to the v of the owner.

    Attributes:
        velocity: u.
        sum: v, what has not been sent yet.
    """

    name = "dgc"
    adds_own = False

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        super().__init__(form, n, kind, scratch)
        self._momentum: float = form.options["momentum"]
        self.velocity: Array = np.zeros(n, kind.storage)
        self.sum: Array = np.zeros(n, kind.storage)
        self._moved: Array | None = None

    def correct(self, data: Flat, span: slice) -> Array:
        corrected, moved = self._take(data.size), self._take(data.size)
        self._kernels.feedback_move(
            data.data, data.dtype, self.velocity[span], self.sum[span], moved, corrected, self._momentum
        )
        self._moved = moved
        return corrected

    def keep(self, corrected: Array, decoded: Array, span: slice, weight: float = 1.0) -> None:
        moved, self._moved = self._moved, None
        assert moved is not None
        if self._kernels.feedback_mask(corrected, decoded, moved, self._wide):
            self.sum = self._replaced(self.sum, decoded, span)
            self.velocity = self._replaced(self.velocity, moved, span)
        else:
            self._scratch.give(decoded)
            self._scratch.give(moved)
        self._scratch.give(corrected)

    def own(self, codec: Codec, data: Flat, span: slice) -> Array:
        message = self._scratch.take(codec.bound(data.size, self.kind), np.uint8)
        nbytes = self.encode(codec, data, message, span)
        decoded = self._decoded(codec, message[:nbytes], data.size)
        self._scratch.give(message)
        return decoded

    def encode_sum(self, codec: Codec, total: Array, out: ByteArray, span: slice, ranks: int = 1) -> int:
        if ranks > 1:
            total /= ranks
        nbytes = self._write(codec, total, total.shape, out)
        lost = self._decoded(codec, out[:nbytes], total.size)
        mine = self.sum[span]
        # What was lost, then what v becomes with it: neither is kept if it is not finite.
        if self._kernels.feedback_lose(total, lost, lost, self._wide, float(ranks)) and (
            self._kernels.feedback_add(mine, self.kind, lost, lost, False)
        ):
            mine[:] = lost
        self._scratch.give(lost)
        self._scratch.give(total)
        return nbytes

    def arrays(self) -> dict[str, Array]:
        return {"": self.sum.copy(), "velocity": self.velocity.copy()}

    @classmethod
    def restore(cls, form: Form, arrays: dict[str, Array], scratch: Scratch) -> MomentumMemory:
        main, kind = main_array(arrays, ("velocity",))
        memory = cls(form, 0, kind, scratch)
        memory.n, memory.sum = main.size, main.copy()
        memory.velocity = arrays["velocity"].copy() if "velocity" in arrays else np.zeros_like(main)
        return memory
