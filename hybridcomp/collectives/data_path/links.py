"""Keep the state of a link from one send to the next: the error of its last message, and PowerSGD's factor.

A link is what a program names so (:class:`~hybridcomp.policy.places.Place`): sends of one array after another to one
receiver, which takes every message by itself and knows of no memory. For the gradients that a pipeline sends backward
this is the "lazy error propagation" of Song et al., "Optimus-CC" (arXiv:2301.09830).
"""

from __future__ import annotations

import math

import numpy as np

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.codecs import Codec, ErrorFeedback, Memory
from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.codecs.linear.powersgd import PowerSGDCodec, factor_of
from hybridcomp.collectives.data_path.coding import Array
from hybridcomp.collectives.execution.widths import narrow


class Link:
    """The state of one link.

    Args:
        key: of its error feedback; the last part is the link's name.
        form: of error feedback; None for none.
        feedback: where that is kept.
        warm: where PowerSGD's Q is kept, by link.
    """

    def __init__(self, key: Key, form: str | None, feedback: ErrorFeedback, warm: dict[str, Array]) -> None:
        self._key = key
        self._name = str(key[-1])
        self._form = form
        self._feedback = feedback
        self._warm = warm

    def encode(self, codec: Codec, data: Flat, out: ByteArray) -> int:
        """Encode an array in host memory with what the link remembers, and remember what that lost.

        Data that is not finite leaves the memory as it was.

        Args:
            codec: for the message, which is of the data's dtype.
            data: not changed.
            out: at least ``codec.bound(data.size, data.dtype)`` bytes.

        Returns:
            Bytes of the message.
        """
        if isinstance(codec, PowerSGDCodec):
            codec = codec.beginning_with(self._warm.get(self._name))
        nbytes = self._encode(codec, data, out)
        if isinstance(codec, PowerSGDCodec):
            q = factor_of(out[:nbytes])
            if np.isfinite(q).all():
                self._warm[self._name] = q
        return nbytes

    def _encode(self, codec: Codec, data: Flat, out: ByteArray) -> int:
        if self._form is None:
            return codec.encode_flat(data, out)
        memory = self._feedback.memory(self._key, data.size, data.dtype, self._form)
        codec = codec.at_step(memory.begin())
        if data.dtype is memory.kind:
            return memory.encode(codec, data, out)
        return _narrowly(memory, codec, data, out)


def _narrowly(memory: Memory, codec: Codec, data: Flat, out: ByteArray) -> int:
    """Encode as :meth:`Memory.encode` does, to a message of the data's own dtype: a receiver expects no other."""
    whole = slice(0, data.size)
    corrected = memory.correct(data, whole)
    nbytes = codec.encode_flat(data._replace(data=narrow(corrected, data.dtype)), out)
    decoded = np.empty(data.size, memory.kind.storage)
    codec.decode_flat(out[:nbytes], wire.peek(out[:nbytes]), decoded, memory.kind)
    memory.keep(corrected, decoded, whole)
    return nbytes


def as_rows(data: Flat) -> Flat:
    """Return an array in the shape in which it is sent: of more than two dimensions, all but the last are rows.

    So it is with activations, [batch, time, width]: a codec that looks for structure finds it in that matrix.
    """
    if len(data.shape) <= 2:
        return data
    *rows, columns = data.shape
    return data._replace(shape=(math.prod(rows), columns))
