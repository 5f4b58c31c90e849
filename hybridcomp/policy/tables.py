"""Plan the compression of embedding tables' rows: a bound and a coder for each table, wider at first.

After "Accelerating Communication in Deep Learning Recommendation Model Training with Dual-Level Adaptive Lossy
Compression" (Feng et al., SC'24, arXiv:2407.04272), of whose two levels :func:`plan_table` is the one by tables and
:func:`table_policy` the one by iterations. Values that the paper takes from an analysis of its data sets (bounds,
limits of the classes) are arguments here.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.codecs.bounded import MOST_VECTOR, BoundedCodec
from hybridcomp.errors import ConfigError
from hybridcomp.policy.rules import Policy, Rule

BOUNDS = (0.05, 0.03, 0.01)
LIMITS = (0.01, 0.1)
_REPEATS = 3  # runs, of which the fastest counts


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Plan of a table: its properties, and how its rows are sent.

    Attributes:
        index: homogenization index of the table.
        bound: absolute error bound of its class.
        codec: spec of the codec that sends it: ``bounded`` with that bound and the better coder.
        ratio: bytes of the sample over those of its messages.
    """

    index: float
    bound: float
    codec: str
    ratio: float


def homogenization_index(rows: Any, bound: float) -> float:
    """Compute the share of a table's distinct rows that quantization merges with others.

    1 - (distinct rows after quantization) / (distinct rows before): 0 where all stay apart, nearly 1 where all become
    one.

    Args:
        rows: float array or CPU tensor [n, elements]; repeated rows count once.
        bound: absolute error bound of the quantization.

    Raises:
        ConfigError: there are no rows, or they have another shape.
    """
    shape, dtype = _checked(rows)
    before = _distinct(_values(get_codec("none"), rows, dtype), shape)
    # By this coder an element that quantization cannot hold keeps no other one from merging.
    after = _distinct(_values(BoundedCodec(abs=bound, coder="huffman"), rows, dtype), shape)
    return 1 - after / before


def plan_table(
    rows: Any,
    *,
    bounds: Sequence[float] = BOUNDS,
    limits: Sequence[float] = LIMITS,
    rate: float | None = None,
) -> TablePlan:
    """Choose a table's bound by its homogenization index, and its coder by the bytes sent or the time.

    A table of which quantization merges few rows tolerates a wide bound; one whose rows become alike gets a narrow one.
    The index is that of the middle bound.

    Args:
        rows: float array or CPU tensor [n, elements] of rows as a batch looks them up, repeats included.
        bounds: absolute bounds, one for each class, descending.
        limits: limits between the classes, ascending, one fewer: an index up to the first has the first bound.
        rate: bytes/s of the link; the coder whose bytes / rate + seconds of encoding and decoding are fewest is
            taken. None: the one of fewest bytes, which is the same in every run.

    Raises:
        ConfigError: there are no rows, or bounds or limits have another form.
    """
    shape, dtype = _checked(rows)
    _check_classes(bounds, limits)
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"rate must be a finite number of bytes/s above 0, or None, not {rate!r}")
    index = homogenization_index(rows, bounds[len(bounds) // 2])
    bound = bounds[bisect.bisect_left(limits, index)]
    coders = [BoundedCodec(abs=bound, coder="huffman")]
    if shape[1] <= MOST_VECTOR:
        coders.insert(0, BoundedCodec(abs=bound, coder="lz", vector=shape[1]))
    sizes = {codec: len(codec.encode(rows)) for codec in coders}
    best = min(coders, key=lambda codec: sizes[codec] if rate is None else _seconds(codec, rows, dtype, rate))
    return TablePlan(index, bound, best.spec, math.prod(shape) * dtype.itemsize / sizes[best])


def table_policy(
    codec: str | Codec, axis: str, *, until: int = 0, first: float = 2.0, stages: int = 4
) -> Policy:
    """Return a policy that sends collectives of the forward pass by a codec whose bound is wider in the first steps.

    Those are the all-to-alls of embedding rows; a group that also sums or gathers in the forward pass has these
    compressed, too. The bound of step t is f(t) times the codec's: f falls from ``first`` to 1 in ``stages`` equal
    parts, one every until / stages steps. It is a rule with ``steps`` (docs/adapt.md); the backward pass's messages go
    uncompressed.

    Args:
        codec: ``bounded`` with an absolute bound, or its spec.
        axis: mesh axis of the process groups it serves.
        until: first step with the codec's own bound; 0: from the first step on.
        first: factor on the bound in the first steps, at least 1.
        stages: number of parts in which it falls; at most ``until``.

    Raises:
        ConfigError: the codec is another one, or values are out of these ranges.
    """
    base = get_codec(codec)
    if not isinstance(base, BoundedCodec) or base.abs is None:
        raise ConfigError(f"codec must be bounded with an absolute bound, not {base.spec!r}")
    whole = all(type(number) is int for number in (until, stages))
    if not whole or until < 0 or not 1 <= first < math.inf or not (until == 0 or 1 <= stages <= until):
        raise ConfigError(
            f"until must be a whole number from 0, first a number from 1, stages a whole number from 1 to until, not "
            f"{until!r}, {first!r}, {stages!r}"
        )
    if first * base.abs == math.inf:
        raise ConfigError(f"first times the codec's bound must be finite, not {first!r} * {base.abs!r}")
    begins = {until * k // stages: first + (1 - first) * k / stages for k in range(stages if until else 0)}
    factors = sorted({**begins, until: 1.0}.items())
    codecs = [(step, (_widened(base, factor),)) for step, factor in factors]
    rule = Rule(codecs=codecs[0][1], min_bytes=0, steps=tuple(codecs[1:]))
    return Policy(f"tables by {base.spec}", Rule(), {axis: Rule()}, {axis: {"forward": rule}})


def _widened(codec: BoundedCodec, factor: float) -> BoundedCodec:
    assert codec.abs is not None
    return BoundedCodec(
        **{**codec.params, "abs": float(f"{factor * codec.abs:.12g}")}
    )  # rounded: 0.075, not its last bit


def _checked(rows: Any) -> tuple[tuple[int, int], DType]:
    """Return shape and dtype; raise ConfigError unless the rows are two-dimensional floats, and some."""
    flat = arrays.flatten(rows)
    if not flat.dtype.is_float or len(flat.shape) != 2 or not flat.size:
        raise ConfigError(
            f"rows must be floats [n, elements], at least one row, not {flat.dtype.label}{list(flat.shape)}"
        )
    return (flat.shape[0], flat.shape[1]), flat.dtype


def _check_classes(bounds: Sequence[float], limits: Sequence[float]) -> None:
    descending = all(a > b for a, b in itertools.pairwise(bounds))
    ascending = all(a < b for a, b in itertools.pairwise(limits))
    if not bounds or not descending or not all(0 < b < math.inf for b in bounds):
        raise ConfigError(f"bounds must be descending numbers above 0, not {list(bounds)}")
    if len(limits) != len(bounds) - 1 or not ascending:
        raise ConfigError(f"limits must be {len(bounds) - 1} ascending numbers, not {list(limits)}")


def _values(codec: Codec, rows: Any, dtype: DType) -> npt.NDArray[Any]:
    """Return the values that a receiver of the rows gets, as float64 or float32; no -0.0."""
    out: npt.NDArray[Any] = np.empty(arrays.flatten(rows).size, dtype.accumulator.storage)
    codec.decode(np.asarray(codec.encode(rows)), out=out)
    out += 0
    return out


def _distinct(values: npt.NDArray[Any], shape: tuple[int, int]) -> int:
    whole = np.ascontiguousarray(values.reshape(shape)).view(np.dtype((np.void, shape[1] * values.itemsize)))
    return int(np.unique(whole).size)


def _seconds(codec: Codec, rows: Any, dtype: DType, rate: float) -> float:
    """Return the seconds of the rows on a link, and in the codec."""
    flat = arrays.flatten(rows)
    buffer = np.empty(codec.bound(flat.size, dtype), np.uint8)
    out = np.empty(flat.size, dtype.accumulator.storage)

    def fastest(work: Callable[[], Any]) -> float:
        taken = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
        return min(taken)

    encoding = fastest(lambda: codec.encode_flat(flat, buffer))
    message = buffer[: codec.encode_flat(flat, buffer)]
    return len(message) / rate + encoding + fastest(lambda: codec.decode(message, out=out))
