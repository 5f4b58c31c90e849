"""Averages of parameters by linear codecs, round by round; the rounds of a bucket's parameters travel together.

A codec says which array is to be reduced first (:mod:`hybridcomp.codecs.linear`): for ``powersgd`` P, which is
orthonormalised once it is summed, and then Q. Error feedback keeps what the result lacks of this rank's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridcomp.arrays import ByteArray, Flat, as_dtype, byte_view
from hybridcomp.codecs import LinearCodec
from hybridcomp.codecs.linear import FOLDS, Reduced, Round
from hybridcomp.torch.exchange import Exact, Thing
from hybridcomp.torch.hook_plan import Piece

Array = npt.NDArray[Any]


class Linear:
    """One parameter's gradient on its way.

    Attributes:
        things: what was exchanged for it.
    """

    def __init__(
        self,
        piece: Piece,
        values: Array,
        residual: Array | None,
        memory: dict[str, Array],
        step: int,
        rank: int,
        size: int,
    ) -> None:
        """Prepare to average a gradient.

        Args:
            piece: whose codec is linear.
            values: 1-D float32 or float64, replaced by the result.
            residual: of the same size and dtype, updated in place; None for no feedback.
            memory: what the codec keeps between steps, by parameter name; updated.
            step: of training.
            rank, size: of the channel.
        """
        codec = piece.choice.codec
        assert isinstance(codec, LinearCodec)
        self.things: list[Thing] = []
        self._values, self._residual = values, residual
        self._given = values if residual is None else values + residual
        self._rank, self._size = rank, size
        self._result: Reduced | None = None
        self._rounds = codec.reduction(
            Flat(self._given, as_dtype(values.dtype), piece.shape, True, False),
            ranks=size,
            rank=rank,
            mean=True,
            own=residual is not None,
            step=step,
            warm=memory,
            name=piece.name,
        )

    def next(self) -> list[Thing]:
        """What is to be summed next; nothing when the result is here."""
        if self._result is not None:
            return []
        try:
            following = next(self._rounds)
        except StopIteration as end:
            self._result = end.value
            return []
        self.things.append(_thing(following, self._rank, self._size))
        return self.things[-1:]

    def end(self) -> None:
        """Write the result; keep the residual unless the step is not finite."""
        result = self._result
        assert result is not None
        if self._residual is not None and result.own is not None:
            with np.errstate(invalid="ignore"):
                lost = self._given - result.own
            if np.isfinite(lost).all():
                self._residual[:] = lost
        self._values[:] = result.total


def _thing(following: Round, rank: int, size: int) -> Thing:
    array = following.array.reshape(-1)
    if as_dtype(array.dtype).is_float:
        return Exact(torch.from_numpy(array), rank, size, mean=False)
    return Folded(array, FOLDS[following.op], rank, size)


class Folded:
    """An array of integers, reduced as they are."""

    def __init__(self, values: Array, fold: np.ufunc, rank: int, size: int) -> None:
        """Reduce ``values`` in place.

        Args:
            values: 1-D, contiguous.
            fold: what reduces two arrays.
            rank, size: of the channel.
        """
        self.seconds = [0.0, 0.0]
        self._values, self._fold = values, fold
        self._rank = rank
        self._length = -(-values.size // size)
        self.slot = self._length * values.itemsize

    def encode(self, shard: int, out: ByteArray) -> None:
        """See :class:`~hybridcomp.torch.exchange.Thing`."""
        part = byte_view(self._shard(shard))
        out[: part.size] = part

    def reduce(self, parts: Sequence[ByteArray], out: ByteArray) -> None:
        """See :class:`~hybridcomp.torch.exchange.Thing`."""
        own = self._shard(self._rank)
        for rank, part in enumerate(parts):
            if rank != self._rank:
                self._fold(own, part[: own.nbytes].view(own.dtype), out=own)
        self.encode(self._rank, out)

    def decode(self, shard: int, message: ByteArray) -> None:
        """See :class:`~hybridcomp.torch.exchange.Thing`."""
        part = self._shard(shard)
        part[:] = message[: part.nbytes].view(part.dtype)

    def _shard(self, shard: int) -> Array:
        return self._values[shard * self._length : (shard + 1) * self._length]
