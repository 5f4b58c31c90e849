"""Plan how the parameters of a bucket are reduced: a policy's choices, grouped by how and when they are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.policy import Choice, Message, Policy

# Of the bucket's elements. What travels together is encoded before it starts: little of it leaves the wire idle for
# a short time only, much has fewer messages.
_BATCH_BYTES = 8 << 20
_LINEAR_BATCH_BYTES = 16 << 20  # of what goes to and fro several times
_SMALL = 1 << 15  # elements of an uncompressed parameter that is not worth a message of its own
_CHUNK = 1 << 20  # elements of a parameter that are one task: its shards and messages fit the caches


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's gradient within a bucket.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        start, stop: its elements in the bucket's buffer.
        choice: what the policy says.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    choice: Choice

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a piece that is one task: ``start`` to ``stop`` of the piece's own elements."""

    piece: Piece
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


Part = TypeVar("Part", Piece, Chunk)


class Split(NamedTuple):
    """The pieces of a bucket.

    Attributes:
        small: uncompressed ones that are too small for messages of their own.
        alone: all others.
    """

    small: list[Piece]
    alone: list[Piece]


@dataclass(slots=True)
class Batch:
    """The pieces of a bucket that are sent together.

    Attributes:
        small: uncompressed pieces that go as one task.
        linear: by codecs that sum in the compressed domain.
        encoded: by codecs that encode elements, which may be ``none``.
    """

    small: list[Piece] = field(default_factory=list)
    linear: list[Piece] = field(default_factory=list)
    encoded: list[Chunk] = field(default_factory=list)

    def codecs(self) -> set[Codec]:
        """Return the codecs by which its pieces are sent."""
        pieces = [*self.small, *self.linear, *(chunk.piece for chunk in self.encoded)]
        return {piece.choice.codec for piece in pieces}


def make_plan(
    policy: Policy,
    axis: str,
    dtype: DType,
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    step: int,
    stage: int | None = None,
    hosts: int | None = None,
) -> list[Batch]:
    """Ask the policy about each parameter of a bucket; return its batches in the order in which they start.

    Args:
        policy, axis: whose section to read.
        dtype: of the bucket.
        parameters: names and shapes, in the bucket's order.
        step: for warm-up.
        stage: of the pipeline, whose parameters they are; None if it has none.
        hosts: that the ranks are on; None where that is not known.
    """
    small, alone = make_split(policy, axis, dtype, parameters, step, stage, hosts)
    linear = [p for p in alone if p.choice.codec.linear]
    others = [p for p in alone if not p.choice.codec.linear]
    size = dtype.itemsize
    batches = [Batch(linear=group) for group in _groups(linear, _LINEAR_BATCH_BYTES // size)]
    batches += [Batch(encoded=group) for group in _groups(_chunks(others), _BATCH_BYTES // size)]
    if small:
        batches = batches or [Batch()]
        batches[0].small = small
    return batches


def make_split(
    policy: Policy,
    axis: str,
    dtype: DType,
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    step: int,
    stage: int | None = None,
    hosts: int | None = None,
) -> Split:
    """Ask the policy about each parameter of a bucket; the arguments are those of :func:`make_plan`."""
    pieces = list(_pieces(policy, axis, dtype, parameters, step, stage, hosts))
    small = [p for p in pieces if _is_small(p)]
    return Split(small, [p for p in pieces if not _is_small(p)])


def _is_small(piece: Piece) -> bool:
    return not piece.choice.compresses and piece.size < _SMALL


def _pieces(
    policy: Policy,
    axis: str,
    dtype: DType,
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    step: int,
    stage: int | None,
    hosts: int | None,
) -> Iterator[Piece]:
    start = 0
    for name, shape in parameters:
        n = math.prod(shape)
        nbytes = n * dtype.itemsize
        message = Message(
            axis, "all_reduce", "backward", dtype, nbytes, name, step, shape, stage, hosts=hosts
        )
        yield Piece(name, shape, start, start + n, policy.choose(message))
        start += n


def _chunks(pieces: Iterable[Piece]) -> Iterator[Chunk]:
    for piece in pieces:
        for start in range(0, piece.size, _CHUNK):
            yield Chunk(piece, start, min(start + _CHUNK, piece.size))


def _groups(parts: Iterable[Part], most: int) -> Iterator[list[Part]]:
    """Yield groups of neighbours, of about ``most`` elements together."""
    group: list[Part] = []
    for part in parts:
        group.append(part)
        if sum(p.size for p in group) >= most:
            yield group
            group = []
    if group:
        yield group
