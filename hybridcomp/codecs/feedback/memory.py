"""Hold the error-feedback state of one key, with the operations that every form has on it.

A memory belongs to one array that is sent again and again, whole or in spans (the chunks of a collective). Data are
corrected, encoded, and decoded as the receiver will decode them; the memory keeps the error. A span whose
step is not finite leaves its state as it was, so that a step which a gradient scaler skips spoils nothing.

In a reduction each rank owns a shard: it sums all ranks' parts of it and encodes the sum once more. A memory serves
that too (:meth:`Memory.own`, :meth:`Memory.encode_sum`, :meth:`Memory.result`), with the state of the owner's shard,
which the rank sends to nobody. States are in units of the sum over all ranks, for a mean too, so that the sum of all
ranks' states is what the sum lacks; :mod:`~hybridcomp.codecs.feedback.resharding` relies on it.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat, as_dtype
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.errors import CodecMismatchError

Array = npt.NDArray[Any]


class Scratch:
    """Temporary memory that is reused by the memories that share it, and by their arrays."""

    @functools.cached_property
    def rooms(self) -> Any:
        """Return the kernels' ``Rooms``, which hold free memory."""
        return native.kernels().Rooms()

    def take(self, n: int, kind: DType) -> Array:
        """Return an uninitialized array of ``n`` float32 or float64, whose memory is reused when it is freed."""
        array: Array = native.kernels().take(self.rooms, n, kind is DType.FLOAT64)
        return array

    def clear(self) -> None:
        """Release all memory that is not in use."""
        self.__dict__.pop("rooms", None)


class Memory(abc.ABC):
    """The state of one key; made by :meth:`~hybridcomp.codecs.feedback.error_feedback.ErrorFeedback.memory`.

    The kernels hold it, and encode, correct and keep without Python for every codec that has an ``Encoder``
    (:file:`kernels/codecs/feedback/memory.hpp`). Other codecs encode and decode between two calls of the kernels:
    one corrects, the other keeps.

    Attributes:
        form: form of feedback, with its parameters.
        n: number of elements.
        kind: dtype of all that is computed here: float32, or float64 for float64 data.
        native: the kernels' memory.
        tracks: whether the receiver adds messages to what it has (:meth:`result`), rather than take them.
    """

    name: ClassVar[str]
    extras: ClassVar[tuple[str, ...]] = ()  # arrays of the state beside the main one

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        self.form = form
        self.n = n
        self.kind = kind
        self.native = self._made(n, kind is DType.FLOAT64, scratch.rooms)
        self.tracks: bool = self.native.tracks
        self._scratch = scratch
        self._seen: dict[str, Array] = {}

    @abc.abstractmethod
    def _made(self, n: int, wide: bool, rooms: Any) -> Any:
        """Make the kernels' memory of this form."""

    @property
    def steps(self) -> int:
        """Return the number of calls of :meth:`begin`."""
        count: int = self.native.steps
        return count

    @steps.setter
    def steps(self, count: int) -> None:
        self.native.steps = count

    @property
    def adds_own(self) -> bool:
        """Tell whether a rank adds its own part of its shard as it is."""
        adds: bool = self.native.adds_own
        return adds

    # -- a sender ------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin a step, of one or of many spans; return its number, from 0, for :meth:`Codec.at_step`."""
        step: int = self.native.begin()
        return step

    def encode(self, codec: Codec, data: Flat, out: ByteArray, span: slice | None = None) -> int:
        """Encode corrected data and keep the error of the message.

        Args:
            codec: codec of the message, whose dtype is :attr:`kind`.
            data: array of any floating-point dtype; not changed.
            out: buffer of at least ``codec.bound(data.size, kind)`` bytes.
            span: where ``data`` lies in the array; None is all of it.

        Returns:
            Bytes of the message.

        Raises:
            CodecMismatchError: the codec cannot carry the data.
        """
        span = slice(0, self.n) if span is None else span
        encoder = self._encoder(codec, data.shape)
        if encoder is None:
            return self._encode_by_halves(codec, data, out, span)
        nbytes: int = self.native.encode(encoder, data.data, data.dtype, _start(span, data.size), out)
        return nbytes

    def _encode_by_halves(self, codec: Codec, data: Flat, out: ByteArray, span: slice) -> int:
        corrected = self.correct(data, span)
        nbytes = codec.encode_flat(self._flat(corrected, data.shape), out)
        self.keep(corrected, self._decoded(codec, out[:nbytes], corrected.size), span)
        return nbytes

    def correct(self, data: Flat, span: slice) -> Array:
        """Return the array to encode for ``data``; it goes back to :meth:`keep`."""
        corrected = self._take(data.size)
        self.native.correct(data.data, data.dtype, _start(span, data.size), corrected)
        return corrected

    def keep(self, corrected: Array, decoded: Array, span: slice, weight: float = 1.0) -> None:
        """Store the error of a message, unless it is not finite.

        Args:
            corrected: array from :meth:`correct`.
            decoded: values decoded from the message; not to be used any more.
            span: as for :meth:`correct`.
            weight: number of ranks where the message is of their mean, else 1.
        """
        self.native.keep(corrected, decoded, _start(span, corrected.size), weight)

    # -- the owner of a shard ------------------------------------------------------------------------

    def own(self, codec: Codec, data: Flat, span: slice) -> Array:
        """Return a new array for the sum of all ranks' parts of an owned span, with this rank's own part in it.

        ``data`` must stay as it is until :meth:`encode_sum`.
        """
        total = self._take(data.size)
        self.native.own(codec.encoder, data.data, data.dtype, _start(span, data.size), total)
        return total

    def summed(self, codec: Codec, data: Flat, messages: Sequence[ByteArray], span: slice) -> Array:
        """Return :meth:`own` with the other ranks' parts added: opened messages of :meth:`encode`, in their order."""
        if self.adds_own and data.dtype is self.kind:
            total = self._take(data.size)
            codec.sum_into(data, messages, 1, total)
            return total
        total = self.own(codec, data, span)
        for message in messages:
            codec.decode_add_flat(message, wire.peek(message), total)
        return total

    def encode_sum(self, codec: Codec, total: Array, out: ByteArray, span: slice, ranks: int = 1) -> int:
        """Encode the sum of an owned span, over ``ranks`` for a mean; return the message's bytes.

        Args:
            codec: codec of the message.
            total: sum from :meth:`summed`, or from :meth:`own` with the other ranks' parts added; not to be used
                any more.
            out: buffer of at least ``codec.bound(total.size, kind)`` bytes.
            span: as for :meth:`own`.
            ranks: number of ranks for a mean, 1 for a sum.
        """
        encoder = self._encoder(codec, total.shape)
        if encoder is None:
            return self._encode_sum_by_halves(codec, total, out, span, ranks)
        nbytes: int = self.native.encode_sum(encoder, total, _start(span, total.size), ranks, out)
        return nbytes

    def _encode_sum_by_halves(
        self, codec: Codec, total: Array, out: ByteArray, span: slice, ranks: int
    ) -> int:
        self.native.correct_sum(total, _start(span, total.size), ranks)
        nbytes = codec.encode_flat(self._flat(total, total.shape), out)
        if not self.tracks:
            decoded = self._decoded(codec, out[:nbytes], total.size)
            self.native.keep_sum(total, decoded, span.start, ranks)
        return nbytes

    def result(self, values: Array, span: slice) -> None:
        """Turn the decoded values of a message of :meth:`encode_sum` into the result, in place.

        Every rank calls this for every span, its own too, where :attr:`tracks` is true.
        """
        self.native.result(values, _start(span, values.size))

    # -- the state -----------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Array]:
        """Return copies of the state's arrays by name; the main one is ``""``."""
        found = {name: self._state(name) for name in ("", *self.extras)}
        return {name: array.copy() for name, array in found.items() if array is not None}

    @classmethod
    def restore(cls, form: Form, arrays: dict[str, Array], scratch: Scratch) -> Memory:
        """Make the memory whose arrays these are.

        Raises:
            ValueError: the arrays are not of this form.
        """
        main, kind = _main_array(arrays, cls.extras)
        memory = cls(form, main.size, kind, scratch)
        for name, array in arrays.items():
            memory.native.state(name, True)[:] = array
        return memory

    def _state(self, name: str) -> Array | None:
        """Return an array of the state, to be changed in place: the same object as long as it is the same memory."""
        found: Array | None = self.native.state(name)
        seen = self._seen.get(name)
        if found is None or (seen is not None and seen.ctypes.data == found.ctypes.data):
            return seen
        self._seen[name] = found
        return found

    def _main(self) -> Array:
        main = self._state("")
        assert main is not None
        return main

    # -- what forms share ----------------------------------------------------------------------------

    def _take(self, n: int) -> Array:
        return self._scratch.take(n, self.kind)

    def _flat(self, values: Array, shape: tuple[int, ...]) -> Flat:
        return Flat(values, self.kind, shape, True, False)

    def _encoder(self, codec: Codec, shape: tuple[int, ...]) -> Any:
        """Return the codec's encoder, or None; raise CodecMismatchError if it cannot carry an array of such a shape."""
        reason = codec.refuses(self._flat(_NOTHING, shape))
        if reason is not None:
            raise CodecMismatchError(f"codec {codec.spec!r} cannot carry this array: {reason}")
        return codec.encoder

    def _decoded(self, codec: Codec, message: ByteArray, n: int) -> Array:
        decoded = self._take(n)
        codec.decode_flat(message, wire.peek(message), decoded, self.kind)
        return decoded


_NOTHING: Array = np.empty(0, np.float32)


def _start(span: slice, n: int) -> int:
    """Return the index at which a span begins; raise ValueError unless it is of ``n`` elements."""
    start: int = span.start
    if span.stop - start != n:
        raise ValueError(f"elements {start} .. {span.stop} are not {n}")
    return start


def _main_array(arrays: dict[str, Array], others: tuple[str, ...]) -> tuple[Array, DType]:
    """Return the main array and its dtype; raise ValueError unless all are float32, or all float64, and of one size."""
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


class JoinedMemory:
    """Memories of one form side by side, each of which remains its key's own.

    Attributes:
        native: the kernels' memory, for operations whose codec has an ``Encoder``.
    """

    def __init__(self, parts: Sequence[Memory], scratch: Scratch) -> None:
        """Take memories whose steps have begun; at least one."""
        self.native = native.kernels().JoinedMemory([part.native for part in parts], scratch.rooms)
