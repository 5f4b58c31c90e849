"""Keep the state of a link from one send to the next: the error of its last message, and PowerSGD's factor.

A program names a link (:class:`~hybridcomp.policy.places.Place`) for sends of one array after another to one receiver,
which takes every message by itself and knows of no memory. For the gradients that a pipeline sends backward this is the
"lazy error propagation" of Song et al., "Optimus-CC" (arXiv:2301.09830).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, Flat, narrow
from hybridcomp.codecs import Codec, ErrorFeedback, Memory
from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.codecs.linear.powersgd import PowerSGDCodec, factor_of

Array = npt.NDArray[Any]


class Link:
    """State of one link.

    Args:
        key: key of its error feedback; the last part is the link's name.
        form: form of error feedback; None for none.
        feedback: store of the error-feedback memories.
        warm: store of PowerSGD's Q, by link name.
    """

    def __init__(self, key: Key, form: str | None, feedback: ErrorFeedback, warm: dict[str, Array]) -> None:
        self._key = key
        self._name = str(key[-1])
        self._form = form
        self._feedback = feedback
        self._warm = warm

    def encode(self, codec: Codec, data: Flat, out: ByteArray) -> int:
        """Encode an array in host memory, corrected by the link's memory, and remember the loss.

        Data that are not finite leave the memory as it was.

        Args:
            codec: codec of the message, which is of the data's dtype.
            data: array to encode, which is not changed.
            out: room for the message: at least ``codec.bound(data.size, data.dtype)`` bytes.

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
    """Encode as :meth:`Memory.encode` does, but to a message of the data's own dtype, which the receiver expects."""
    whole = slice(0, data.size)
    corrected = memory.correct(data, whole)
    nbytes = codec.encode_flat(data._replace(data=narrow(corrected, data.dtype)), out)
    decoded = np.empty(data.size, memory.kind.storage)
    codec.decode_flat(out[:nbytes], wire.peek(out[:nbytes]), decoded, memory.kind)
    memory.keep(corrected, decoded, whole)
    return nbytes


def as_rows(data: Flat) -> Flat:
    """Return an array in the shape in which it is sent: if it has more than two dims, all but the last become rows.

    For activations, [batch, time, width], a codec that looks for structure finds it in that matrix.
    """
    if len(data.shape) <= 2:
        return data
    *rows, columns = data.shape
    return data._replace(shape=(math.prod(rows), columns))
