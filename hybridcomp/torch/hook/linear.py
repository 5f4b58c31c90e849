"""Average parameters by linear codecs, round by round; the rounds of a batch's parameters are sent together.

A codec says which array is to be reduced first (:mod:`hybridcomp.codecs.linear.base`): for ``powersgd`` P, which is
orthonormalised once it is summed, and then Q. Error feedback keeps what the result lacks of this rank's data.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import native
from hybridcomp.arrays import DType, Flat, as_dtype
from hybridcomp.codecs import LinearCodec
from hybridcomp.codecs.linear.base import FOLDS, Reduced, Reduction
from hybridcomp.device import Event
from hybridcomp.torch.hook.plan import Piece
from hybridcomp.torch.hook.reduce_tasks import NONE, EncodedTask, FoldedTask, ReduceTask, Shards

Array = npt.NDArray[Any]


class Rounds(abc.ABC):
    """A reduction by a linear codec, as tasks that are summed one after another.

    Attributes:
        tasks: the tasks that were exchanged for it.
    """

    def __init__(
        self, reduction: Reduction, rank: int, size: int, wait_for: Callable[[Event], None] | None = None
    ) -> None:
        """Prepare.

        Args:
            reduction: whose rounds are arrays in host memory.
            rank, size: of the link.
            wait_for: is called with the event after which a round's array, which a device fills, may be read.
        """
        self.tasks: list[ReduceTask] = []
        self._reduction, self._rank, self._size, self._wait_for = reduction, rank, size, wait_for
        self._result: Reduced | None = None

    def next(self) -> list[ReduceTask]:
        """Return the arrays to sum next; an empty list when the result is here."""
        if self._result is not None:
            return []
        began = time.perf_counter()
        try:
            following = next(self._reduction)
        except StopIteration as end:
            self._result = end.value
            return []
        if following.ready is not None:
            assert self._wait_for is not None
            self._wait_for(following.ready)
        array = following.array.reshape(-1)
        dtype, shards = as_dtype(array.dtype), Shards.equal(array.size, self._rank, self._size)
        task: ReduceTask
        if dtype.is_float:
            task = EncodedTask(NONE, array, dtype, shards, mean=False)
        else:
            task = FoldedTask(array, FOLDS[following.op], shards)
        task.seconds[0] += time.perf_counter() - began
        self.tasks.append(task)
        return [task]

    def end(self) -> None:
        """Write the result; keep what it lacks, for error feedback."""
        began = time.perf_counter()
        assert self._result is not None
        self._end(self._result)
        self.tasks[-1].seconds[1] += time.perf_counter() - began

    @abc.abstractmethod
    def _end(self, result: Reduced) -> None: ...


class Linear(Rounds):
    """The reduction of one parameter's gradient in host memory."""

    def __init__(
        self,
        piece: Piece,
        values: Array,
        dtype: DType,
        residual: Array | None,
        memory: dict[str, Array],
        step: int,
        rank: int,
        size: int,
    ) -> None:
        """Prepare to average a gradient.

        Args:
            piece: whose codec is linear.
            values: 1-D, of ``dtype``'s storage, replaced by the result.
            dtype: of the gradient.
            residual: of the same size, of the accumulator's dtype, updated in place; None for no feedback.
            memory: what the codec keeps between steps, by parameter name; updated.
            step: of training.
            rank, size: of the link.
        """
        codec = piece.choice.codec
        assert isinstance(codec, LinearCodec)
        self._values, self._dtype, self._residual = values, dtype, residual
        wide = dtype.accumulator
        given = values
        if residual is not None:
            given = values if dtype is DType.FLOAT32 else np.empty(values.size, wide.storage)
            native.kernels().feedback_add(values, dtype, residual, given, False)
        self._given = given
        kind = dtype if residual is None else wide
        reduction = codec.reduction(
            Flat(given, kind, piece.shape, True, False),
            ranks=size,
            rank=rank,
            mean=True,
            own=residual is not None,
            step=step,
            warm=memory,
            name=piece.name,
            residual=residual,
        )
        super().__init__(reduction, rank, size)

    def _end(self, result: Reduced) -> None:
        """Write the result, and update the residual unless the step is not finite."""
        if self._residual is not None and result.own is not None:
            with np.errstate(invalid="ignore"):
                lost = self._given - result.own
            if np.isfinite(lost).all():
                self._residual[:] = lost
        if result.total is not self._values:
            native.kernels().convert(result.total, self._dtype.accumulator, self._values, self._dtype, False)
