"""What one key of error feedback remembers, and what every form does with it.

A memory belongs to one array that is sent again and again, whole or in spans (the chunks of a collective). Data are
corrected, encoded, and decoded as the receiver will decode them; the memory keeps what that lost. A span whose
step is not finite leaves its state as it was, so that a step which a gradient scaler skips spoils nothing.

In a reduction each rank owns a shard: it sums all ranks' parts of it and encodes the sum once more. A memory serves
that too (:meth:`Memory.own`, :meth:`Memory.encode_sum`, :meth:`Memory.result`), with the state of the owner's shard,
which the rank sends to nobody. States are in units of the sum over all ranks, for a mean too, so that what is
missing from the sum is the sum of all ranks' states; :mod:`.resharding` relies on it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.forms import Form
from hybridcomp.errors import CodecMismatchError

Array = npt.NDArray[Any]
_LARGE = 1 << 20  # bytes; smaller arrays come cheaply from the allocator
_SPARE = 3  # arrays of one size that are kept: two during a step, one of another key's


class Scratch:
    """Arrays that are used again: fresh pages of a large array cost more than encoding it.

    A state is replaced by exchanging its array with one of these, so there are few for each size in use.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, np.dtype[Any]], list[Array]] = {}

    def take(self, n: int, dtype: npt.DTypeLike) -> Array:
        """An array of ``n`` elements with anything in it."""
        kind = np.dtype(dtype)
        try:
            return self._free[n, kind].pop()
        except (KeyError, IndexError):
            return np.empty(n, kind)

    def give(self, array: Array) -> None:
        """Take back an array that nobody uses any more."""
        if array.nbytes >= _LARGE and array.base is None:
            free = self._free.setdefault((array.size, array.dtype), [])
            if len(free) < _SPARE:
                free.append(array)

    def clear(self) -> None:
        """Let all arrays go."""
        self._free.clear()


class Memory(abc.ABC):
    """The state of one key; made by :meth:`~hybridcomp.codecs.feedback.ErrorFeedback.memory`.

    Attributes:
        form: with its parameters.
        n: elements.
        kind: float32, or float64 for float64 data: of all that is computed here.
        steps: how often :meth:`begin` was called.
        tracks: whether the receiver adds messages to what it has (:meth:`result`), rather than take them.
        adds_own: whether a rank adds its own part of its shard as it is.
    """

    name: ClassVar[str]
    tracks: ClassVar[bool] = False
    adds_own: ClassVar[bool] = True

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        self.form = form
        self.n = n
        self.kind = kind
        self.steps = 0
        self._scratch = scratch
        self._wide = kind is DType.FLOAT64
        self._kernels = native.kernels()

    # -- a sender ------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin a step, of one or of many spans; return its number, from 0, for :meth:`Codec.at_step`."""
        self.steps += 1
        return self.steps - 1

    def encode(self, codec: Codec, data: Flat, out: ByteArray, span: slice | None = None) -> int:
        """Encode corrected data and keep what that lost.

        Args:
            codec: for the message, which is of :attr:`kind`.
            data: of any floating-point dtype; not changed.
            out: at least ``codec.bound(data.size, kind)`` bytes.
            span: where ``data`` lies in the array; None is all of it.

        Returns:
            Bytes of the message.

        Raises:
            CodecMismatchError: the codec cannot carry it.
        """
        span = slice(0, self.n) if span is None else span
        nbytes = self._encode_at_once(codec, data, out, span)
        if nbytes is None:
            corrected = self.correct(data, span)
            nbytes = self._write(codec, corrected, data.shape, out)
            self.keep(corrected, self._decoded(codec, out[:nbytes], corrected.size), span)
        return nbytes

    @abc.abstractmethod
    def correct(self, data: Flat, span: slice) -> Array:
        """What to encode for ``data``: an array that goes back to :meth:`keep`."""

    @abc.abstractmethod
    def keep(self, corrected: Array, decoded: Array, span: slice, weight: float = 1.0) -> None:
        """Keep what a message lost, unless it is not finite.

        Args:
            corrected: from :meth:`correct`; not to be used any more.
            decoded: what the message decodes to; not to be used any more.
            span: as for :meth:`correct`.
            weight: ranks, where the message is of a mean over them.
        """

    def _encode_at_once(self, codec: Codec, data: Flat, out: ByteArray, span: slice) -> int | None:
        """:meth:`encode` in one pass over memory, or None where there is no kernel for it."""
        return None

    # -- the owner of a shard ------------------------------------------------------------------------

    def own(self, codec: Codec, data: Flat, span: slice) -> Array:
        """A new array for the sum of all ranks' parts of an owned span, with this rank's own part in it."""
        return self._widened(data)

    def summed(self, codec: Codec, data: Flat, messages: Sequence[ByteArray], span: slice) -> Array:
        """:meth:`own` with the other ranks' parts added: opened messages of :meth:`encode`, in their order."""
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
            codec: for the message.
            total: from :meth:`summed`, or from :meth:`own` with the other ranks' parts added; not to be used any
                more.
            out: at least ``codec.bound(total.size, kind)`` bytes.
            span: as for :meth:`own`.
            ranks: number of ranks for a mean, 1 for a sum.
        """
        corrected = self.correct(self._flat(total), span)
        if ranks > 1:
            corrected /= ranks
        nbytes = self._write(codec, corrected, corrected.shape, out)
        self.keep(corrected, self._decoded(codec, out[:nbytes], corrected.size), span, ranks)
        return nbytes

    def result(self, values: Array, span: slice) -> None:
        """Make the result of what a message of :meth:`encode_sum` decodes to, in place.

        Every rank calls this for every span, its own too, where :attr:`tracks` is true.
        """
        raise NotImplementedError(f"messages of {self.name} are results")

    # -- saving --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Copies of the state's arrays by name; the main one is ``""``."""

    @classmethod
    @abc.abstractmethod
    def restore(cls, form: Form, arrays: dict[str, Array], scratch: Scratch) -> Memory:
        """The memory that gave ``arrays``.

        Raises:
            ValueError: they are not of this form.
        """

    # -- what forms share ----------------------------------------------------------------------------

    def _take(self, n: int) -> Array:
        return self._scratch.take(n, self.kind.storage)

    def _flat(self, values: Array) -> Flat:
        return Flat(values, self.kind, values.shape, True, False)

    def _widened(self, data: Flat) -> Array:
        wide = np.empty(data.size, self.kind.storage)
        self._kernels.convert(data.data, data.dtype, wide, self.kind, False)
        return wide

    def _write(self, codec: Codec, values: Array, shape: tuple[int, ...], out: ByteArray) -> int:
        flat = Flat(values, self.kind, shape, True, False)
        reason = codec.refuses(flat)
        if reason is not None:
            raise CodecMismatchError(f"codec {codec.spec!r} cannot carry this array: {reason}")
        return codec.encode_flat(flat, out)

    def _decoded(self, codec: Codec, message: ByteArray, n: int) -> Array:
        decoded = self._take(n)
        codec.decode_flat(message, wire.peek(message), decoded, self.kind)
        return decoded

    def _replaced(self, state: Array, fresh: Array, span: slice) -> Array:
        """``state`` with ``fresh`` in a span: ``fresh`` itself if that is all of it. The other is scratch then."""
        if fresh.size == self.n and fresh.base is None:
            self._scratch.give(state)
            return fresh
        state[span] = fresh
        self._scratch.give(fresh)
        return state
