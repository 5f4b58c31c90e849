"""Linear codecs: their messages, or parts of them, may be summed as numbers without being decoded.

An all-reduce by a linear codec is a few all-reduces of plain arrays, which any transport can do: MPI's own
``Allreduce``, ours, or a switch. :meth:`LinearCodec.reduction` is this rank's side of one, as a generator::

    steps = codec.reduction(x, ranks=comm.size, rank=comm.rank)
    try:
        step = next(steps)
        while True:
            step.wait()
            ops = {"sum": MPI.SUM, "max": MPI.MAX, "or": MPI.BOR}
            sums = [comm.Iallreduce(MPI.IN_PLACE, one.array, ops[one.op]) for one in step.together]
            MPI.Request.Waitall(sums)
            step = next(steps)
    except StopIteration as end:
        total = end.value.total

Ranks that give arrays of the same count, dtype and shape to equal codecs go through the same rounds, with
arrays of the same size and dtype. A round depends only on what is the same on all ranks: the counts and the
results of earlier rounds. So where a round's result has the same bits on all ranks, the total has.

:func:`reduce_all` plays all ranks in one process.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridcomp import arrays
from hybridcomp.arrays import Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.late import device_codecs
from hybridcomp.codecs.registry import get_codec
from hybridcomp.device import DeviceArray, Event, Queue

Array = npt.NDArray[Any]
UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "or": np.bitwise_or}


@dataclass(frozen=True, slots=True)
class Round:
    """An all-reduce that a reduction waits for.

    Attributes:
        array: array to be reduced over the ranks in place: C-contiguous, aligned, of any shape, maybe empty;
            float32, float64, or an integer type.
        op: ``"sum"``; for unsigned integers also ``"max"`` and ``"or"`` (bitwise).
        ready: event after which ``array``, which is then in pinned host memory, may be read: a device fills it.
            None: the values are there.
        beside: another round, to be reduced at the same time by an operation of its own: neither waits for the
            other's result. It has none beside it.
    """

    array: Array
    op: str
    ready: Event | None = None
    beside: Round | None = None

    @property
    def together(self) -> tuple[Round, ...]:
        """Return this all-reduce, and the one beside it if there is one."""
        return (self,) if self.beside is None else (self, self.beside)

    def wait(self) -> None:
        """Return when the arrays hold this rank's part."""
        for one in self.together:
            if one.ready is not None:
                one.ready.wait()


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a reduction on one rank.

    Attributes:
        total: approximate sum (or mean) of all ranks' arrays: 1-D, float32 (float64 for float64).
        own: this rank's part of the total, an approximation of its array; for ``powersgd`` the mean. Error feedback
            keeps the difference. None where it was not asked for.
        replaced: whether ``total`` is in the memory of ``x``, and the residual that was given is up to date.
        recovered: share of the elements that ``total`` holds as the codec promises: below 1 only for
            ``sketch`` where its sketch was too small.

    In a reduction of device memory, ``total`` and ``own`` are there too, in the order of its queue.
    """

    total: Any
    own: Any
    recovered: float = 1.0
    replaced: bool = False


Reduction = Generator[Round, None, Reduced]


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a reduction; the attributes are the arguments of :meth:`LinearCodec.reduction`."""

    ranks: int
    rank: int = 0
    mean: bool = False
    own: bool = True
    step: int = 0
    warm: dict[str, Array] | None = None
    name: str | None = None
    residual: Array | None = None


class LinearCodec(Codec):
    """Base class of linear codecs.

    Attributes:
        sums: the most arrays that the rounds of a reduction have.
        fixed_sums: whether these have the same sizes for all arrays of one shape.
    """

    linear: ClassVar[bool] = True
    sums: ClassVar[int]
    fixed_sums: bool = True

    def reduction(
        self,
        x: Flat,
        *,
        ranks: int,
        rank: int = 0,
        mean: bool = False,
        own: bool = True,
        step: int = 0,
        warm: dict[str, Array] | None = None,
        name: str | None = None,
        queue: Queue | None = None,
        residual: Array | None = None,
    ) -> Reduction:
        """Sum ``x`` over all ranks: a generator of rounds that returns a :class:`Reduced`.

        Args:
            x: this rank's values: any float dtype; they are not changed, and must not change meanwhile.
            ranks: number of ranks.
            rank: this rank; it only picks random numbers, where ranks draw different ones.
            mean: whether to divide by ``ranks``.
            own: whether :attr:`Reduced.own` is wanted; error feedback needs it.
            step: 0, 1, ...; the same on all ranks. Codecs that draw random numbers draw others at each step.
            warm: memory by name that the codec may keep between steps.
            name: name of the parameter.
            residual: array of ``x``'s size and type, for codecs that can save passes over memory: they may write the
                mean to ``x``, which then is the caller's data with its residual added, and ``x`` less the mean to this;
                :attr:`Reduced.replaced` says that it was done. A residual of data that are not finite is not touched.
            queue: queue to work on, if ``x`` is in a device's memory; the default stream's if None.

        Raises:
            CudaUnavailableError: ``x`` is on a device, and this codec takes no device arrays.
            ValueError: so many ranks cannot be summed with these parameters.
        """
        terms = Terms(ranks, rank, mean, own, step, warm, name, residual)
        if isinstance(x.data, DeviceArray):
            result: Reduction = device_codecs("linear.base").reduce(
                self, x, terms, queue or Queue(x.data.runtime, 0)
            )
            return result
        return self.reduce(x, terms)

    @abc.abstractmethod
    def reduce(self, x: Flat, terms: Terms) -> Reduction:
        """Make the generator that :meth:`reduction` returns for host memory."""


def derived_seed(seed: int, *counters: int) -> int:
    """Return a seed from 0 to 2^63 - 1 for each combination of a seed and counters (splitmix64 over them)."""
    state = seed
    for counter in counters:
        state = _mixed((state + 0x9E3779B97F4A7C15 * (counter + 1)) & _WORD)
    return state >> 1


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


_WORD = 2**64 - 1


def reduce_all(
    codec: Codec | str,
    parts: Sequence[Any],
    *,
    mean: bool = False,
    step: int = 0,
    warm: Sequence[dict[str, Array]] | None = None,
    name: str | None = None,
) -> list[Reduced]:
    """Run a reduction of all ranks in this process: for tests and examples.

    Args:
        codec: a linear codec or its spec.
        parts: each rank's array; the same shape and dtype.
        mean, step, name: see :meth:`LinearCodec.reduction`.
        warm: each rank's memory.

    Returns:
        The result of each rank; floats are summed in rank order.

    Raises:
        TypeError: the codec is not linear.
        ValueError: the ranks' rounds differ.
    """
    linear = get_codec(codec)
    if not isinstance(linear, LinearCodec):
        raise TypeError(f"codec {linear.spec!r} is not linear")
    runs = [
        linear.reduction(
            arrays.flatten(part, device=True),
            ranks=len(parts),
            rank=rank,
            mean=mean,
            step=step,
            warm=None if warm is None else warm[rank],
            name=name,
        )
        for rank, part in enumerate(parts)
    ]
    while True:
        rounds, results = [], []
        for run in runs:
            try:
                rounds.append(next(run))
            except StopIteration as end:
                results.append(end.value)
        if not rounds:
            return results
        kinds = [[(one.op, one.array.shape, one.array.dtype) for one in each.together] for each in rounds]
        if results or any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"ranks differ in their rounds: {kinds}")
        for each in rounds:
            each.wait()
        for same in zip(*(each.together for each in rounds), strict=True):
            total = same[0].array.copy()
            for later in same[1:]:
                UFUNCS[later.op](total, later.array, out=total)
            for one in same:
                one.array[...] = total
