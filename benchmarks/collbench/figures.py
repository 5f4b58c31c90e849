"""The arithmetic of the benchmarks: sizes, expected results, bandwidths, limits. docs/performance.md derives it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import hybridcomp as hc
from hybridcomp.net.rate import Rate

from .elements import Elements

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
PERIOD = 4_194_301  # values: more than in any chunk that a codec sees, and a prime, so that shards differ
_STRIDE = 524_287  # values from the beginning of one rank's data to the next one's
_SLICE = 1 << 20  # values that are compared at once
_BURSTS = 4  # messages of fewer bytes than so many token buckets hold are hardly shaped


def parse_size(text: str) -> int:
    """Return the bytes of ``64M``, ``4K``, ``1000``."""
    found = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64K, 64M or 1G")
    return int(found[1]) * _UNITS[found[2]]


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of each size in ``64M``, ``64K,1M``, or ``first:last:factor``."""
    if ":" not in text:
        return [parse_size(part) for part in text.split(",")]
    first, last, *factor = text.split(":")
    step = int(factor[0]) if factor else 2
    if step < 2:
        raise argparse.ArgumentTypeError(f"the factor between sizes must be at least 2, not {step}")
    sizes, size = [], parse_size(first)
    while size <= parse_size(last):
        sizes.append(size)
        size *= step
    return sizes


def size_text(nbytes: int) -> str:
    """Return a number of bytes as text: ``64M`` for 67108864."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def parse_codecs(text: str) -> list[str]:
    """Return the specs in a text, separated by ``;``, or by ``,`` where none of them has parameters."""
    specs = text.split(",") if "=" not in text and ";" not in text else text.split(";")
    try:
        return [hc.get_codec(spec).spec for spec in specs]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class Piece:
    """A part of a receive buffer: the sum of equally long parts of some ranks' send buffers.

    Attributes:
        count: number of elements.
        sources: (rank, first element in its send buffer) of each term.
    """

    count: int
    sources: tuple[tuple[int, int], ...]


class Values:
    """Gaussian values of every rank, which every rank knows without a message.

    All ranks' data are windows of one periodic series, so that a result of any size is checked in little time and
    memory.
    """

    def __init__(self, elements: Elements) -> None:
        self.elements = elements
        series = elements.of(np.random.default_rng(7).standard_normal(PERIOD, np.float32))
        self._series = np.concatenate([series, series[:_SLICE]])

    def of(self, rank: int, n: int) -> NDArray:
        """Return the ``n`` values that ``rank`` sends."""
        at = rank * _STRIDE % PERIOD
        if at + n <= self._series.size:
            return self._series[at : at + n].copy()
        return np.resize(np.roll(self._series[:PERIOD], -at), n)

    def expected(self, pieces: Sequence[Piece]) -> Iterator[NDArray[np.float64]]:
        """Yield the expected receive buffer in float64, slice by slice."""
        for piece in pieces:
            for start in range(0, piece.count, _SLICE):
                count = min(_SLICE, piece.count - start)
                total = np.zeros(count)
                for rank, first in piece.sources:
                    at = (rank * _STRIDE + first + start) % PERIOD
                    total += self.elements.wide(self._series[at : at + count])
                yield total

    def error(self, got: NDArray, pieces: Sequence[Piece]) -> float:
        """Return the relative L2 error of a receive buffer; NaN or infinity where it holds one.

        Raises:
            ValueError: the buffer has not as many elements as the pieces.
        """
        if (wanted := sum(piece.count for piece in pieces)) != got.size:
            raise ValueError(f"the pieces have {wanted} elements, the receive buffer {got.size}")
        at, lost, norm = 0, 0.0, 0.0
        for want in self.expected(pieces):
            difference = self.elements.wide(got[at : at + want.size]) - want
            lost += float(difference @ difference)
            norm += float(want @ want)
            at += want.size
        return (lost / norm) ** 0.5 if norm else lost

    def codec_error(self, spec: str) -> float:
        """Return the relative L2 error of one encoding of such values."""
        x = self._series[:_SLICE]
        decoded = np.empty_like(x)
        message = hc.get_codec(spec).encode(self.elements.handed(x))
        hc.decode(message, out=self.elements.handed(decoded))
        wide = self.elements.wide(x)
        return float(np.linalg.norm(self.elements.wide(decoded) - wide) / np.linalg.norm(wide))


def link_seconds(nbytes: float, rate: str) -> float | None:
    """Return the seconds that a link of the lab needs for ``nbytes`` in one direction; None where no rate limits it.

    No rate limits an unshaped link, nor so few bytes that the token bucket, which lets its content pass unshaped,
    carries much of them.
    """
    shaped = Rate.parse(rate)
    if shaped.bits_per_second is None or nbytes < _BURSTS * shaped.burst_bytes:
        return None
    return nbytes * 8 / shaped.bits_per_second


def hidden(communication: float, computation: float, both: float) -> float:
    """Return the share of the shorter of two that ran behind the other; below 0 where they are slower together."""
    return (communication + computation - both) / min(communication, computation)
