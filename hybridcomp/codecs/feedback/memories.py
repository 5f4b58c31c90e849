"""The forms of error feedback that keep an error. C is encode and decode.

``ef``: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., arXiv:1901.09847. ::

    c = x + e;  send C(c);  e = c - C(c)

``ef-sgdm``: dist-EF-SGDM of Zheng, Huang and Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with
Error-Feedback", arXiv:1905.10936, without its learning rates, as BytePS-Compress has it (Zhong et al.,
arXiv:2105.07829): Nesterov's momentum before ``ef``. It replaces the optimizer's own momentum, which must be off. ::

    u = momentum u + x;  c = x + momentum u + e;  send C(c);  e = c - C(c)

Each rank applies momentum to its own data: in a reduction the owner of a shard adds its data with momentum, as the
others do, and their sum is corrected as under ``ef``.

``loco``: Xie et al., arXiv:2407.04480. The error is a moving average, kept in 8 bits (the payload of an ``int8``
message, blocks of 128), and forgotten every ``reset_steps`` steps of its key. ::

    c = x + e;  send C(c);  e = beta e + (1 - beta) (c - C(c))

The error of a step is sent in the steps after it, in shares (1 - beta) beta^k that add up to one: the data so far less
the messages so far are e / (1 - beta), where ``ef`` has e. Lost for good are, both over (1 - beta), the rounding to 8
bits at each step (half a scale at most: 1/254 of the largest error of the block) and the error that a reset forgets.
The mean of a reduction divides by all ranks of its communicator.

``dgc``: Lin et al., "Deep Gradient Compression", arXiv:1712.01887: momentum correction and momentum factor masking.
It replaces the optimizer's own momentum, which must be off. ::

    u = momentum u + x;  v = v + u;  send C(v);  v = v - C(v);  u = 0 where C(v) is not 0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.codecs.feedback.memory import Array, Memory, Scratch
from hybridcomp.codecs.quantize import Int8Codec
from hybridcomp.errors import WireError

STATE_CODEC = Int8Codec(block=128)  # codec of loco's state


class _WithVelocity(Memory):
    """A memory with a velocity beside its main array."""

    extras = ("velocity",)

    @property
    def velocity(self) -> Array:
        """Return u, the velocity."""
        velocity = self._state("velocity")
        assert velocity is not None
        return velocity


class PlainMemory(Memory):
    """The memory of ``ef``."""

    name = "ef"

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        super().__init__(form, n, kind, scratch)
        self._momentum: Array | None = None

    def _made(self, n: int, wide: bool, rooms: Any) -> Any:
        return native.kernels().PlainMemory(n, wide, rooms)

    def blend(self, momentum: Array | None, beta: float = 0.0) -> None:
        """Send, from now on, a momentum of which data are a part: ``beta * momentum + (1 - beta) * data``.

        Data must then be this rank's own, not a sum of several ranks'.

        Args:
            momentum: aligned array [n] of :attr:`kind`, read in each step; None sends the data themselves again.
            beta: share of the momentum, from 0 to below 1.

        Raises:
            ValueError: the momentum has another size, or ``beta`` is out of its range.
        """
        self.native.blend(momentum, beta)
        self._momentum = momentum  # the kernels read its memory

    @property
    def error(self) -> Array:
        """Return the error that has not been sent yet; may be changed in place."""
        return self._main()


class AcceleratedMemory(PlainMemory, _WithVelocity):
    """The memory of ``ef-sgdm``."""

    name = "ef-sgdm"

    def _made(self, n: int, wide: bool, rooms: Any) -> Any:
        return native.kernels().AcceleratedMemory(n, wide, rooms, self.form.options["momentum"])


class AverageMemory(Memory):
    """The memory of ``loco``.

    The 8 bits lose at most half a scale of their block, 1/254 of its largest error, at each step.
    """

    name = "loco"

    def _made(self, n: int, wide: bool, rooms: Any) -> Any:
        options = self.form.options
        return native.kernels().AverageMemory(n, wide, rooms, options["beta"], options["reset_steps"])

    @property
    def message(self) -> ByteArray:
        """Return the state, an ``int8`` message but for its header."""
        return self._main()

    @property
    def error(self) -> Array:
        """Return a copy of the state in :attr:`kind`."""
        message, values = self._sealed(), np.empty(self.n, self.kind.storage)
        STATE_CODEC.decode_flat(message, wire.peek(message), values, self.kind)
        return values

    def _sealed(self) -> ByteArray:
        message = self.message
        codec, payload = STATE_CODEC, message.size - wire.HEADER_BYTES
        wire.seal(message, codec.wire_id, codec.params_hash, dtype=self.kind, count=self.n, payload=payload)
        return message

    def arrays(self) -> dict[str, Array]:
        return {"": self._sealed().copy()}

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
        memory = cls(form, header.count, header.dtype, scratch)
        memory.message[:] = raw
        return memory


class MomentumMemory(_WithVelocity):
    """The memory of ``dgc``.

    In a reduction a rank treats its own shard as it treats the others': it adds C(v) to the sum, so that all
    ranks weigh alike. The error of the sum's own message goes to the v of the owner.
    """

    name = "dgc"

    def _made(self, n: int, wide: bool, rooms: Any) -> Any:
        return native.kernels().MomentumMemory(n, wide, rooms, self.form.options["momentum"])

    @property
    def sum(self) -> Array:
        """Return v, the sum that has not been sent yet."""
        return self._main()

    def own(self, codec: Codec, data: Flat, span: slice) -> Array:
        if codec.encoder is not None:
            return super().own(codec, data, span)
        message = np.empty(codec.bound(data.size, self.kind), np.uint8)
        nbytes = self.encode(codec, data, message, span)
        return self._decoded(codec, message[:nbytes], data.size)
