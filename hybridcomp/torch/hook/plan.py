"""Plan how the parameters of a bucket are reduced: a policy's choices, grouped by how and when they are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.collectives.operations.flat_parts import Together
from hybridcomp.collectives.operations.flat_small import SMALL
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice, Message
from hybridcomp.policy.adapt.adaptation import Asked
from hybridcomp.policy.auto.decider import Decider

# Bytes of the bucket's elements in a batch. A batch is encoded before it starts: a small one leaves the wire idle for
# a short time only, a large one has fewer messages.
_BATCH_BYTES = 8 << 20
_LINEAR_BATCH_BYTES = 16 << 20  # for linear codecs, whose messages go to and fro several times
Kept = TypeVar("Kept")
_SMALL = 1 << 15  # elements of an uncompressed parameter that is not worth a message of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's gradient within a bucket.

    Attributes:
        name: name of the parameter.
        shape: shape of the parameter.
        start, stop: range of its elements in the bucket's buffer.
        choice: the policy's choice.
        size: number of elements.
        kind: codec and reason by which statistics count it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    choice: Choice
    size: int = field(init=False)
    kind: tuple[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.stop - self.start)
        object.__setattr__(self, "kind", (self.choice.counted_as, self.choice.reason))


@dataclass
class Split:
    """Pieces of a bucket.

    Attributes:
        small: uncompressed ones that are too small for messages of their own.
        alone: all others.
        small_as: the choice by whose reason the small ones are counted together: where ``auto`` decides, that of the
            largest one, or it would never learn what they take.
    """

    small: list[Piece]
    alone: list[Piece]
    small_as: Choice = SMALL

    def __post_init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once_for(self, key: Hashable, make: Callable[[Split], Kept]) -> Kept:
        """Return what follows from the pieces for a user of them, made once.

        Args:
            key: key of the user.
            make: function that makes it.
        """
        if key not in self._kept:
            self._kept[key] = make(self)
        kept: Kept = self._kept[key]
        return kept

    @cached_property
    def all_small(self) -> Together:
        """Return the small pieces as one operation carries them."""
        return Together(self.small)

    @cached_property
    def alike(self) -> list[Together]:
        """Return the others as operations carry those of one codec and feedback."""
        groups: dict[tuple[Codec, str | None], list[Piece]] = {}
        for piece in self.alone:
            groups.setdefault((piece.choice.codec, piece.choice.feedback), []).append(piece)
        return [Together(pieces) for pieces in groups.values()]

    @property
    def once(self) -> bool:
        """Tell whether a choice is for this time only."""
        return any(piece.choice.once for piece in self.alone)


def make_split(
    policy: Asked,
    axis: str,
    dtype: DType,
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    step: int,
    stage: int | None = None,
    hosts: int | None = None,
    *,
    remembers: bool = True,
) -> Split:
    """Ask the policy about each parameter of a bucket.

    Args:
        policy, axis: policy to ask, and mesh axis of the ranks.
        dtype: dtype of the bucket.
        parameters: names and shapes, in the bucket's order.
        step: step of training, for warm-up.
        stage: pipeline stage that the parameters belong to; None if there is none.
        hosts: number of hosts that the ranks are on; None where that is not known.
        remembers: whether error feedback may keep residuals for the next bucket.
    """
    pieces = list(_pieces(policy, axis, dtype, parameters, step, stage, hosts, remembers))
    small = [p for p in pieces if _is_small(p)]
    decided = small and isinstance(policy, Decider)
    small_as = max(small, key=lambda piece: piece.size).choice if decided else SMALL
    return Split(small, [p for p in pieces if not _is_small(p)], small_as)


def check_covers(split: Split, elements: int, label: str) -> None:
    """Check that the pieces lie one after another in a buffer, and fill it: what no piece has stays each rank's own.

    Args:
        split: the pieces.
        elements: number of elements of the buffer.
        label: name of the averager, for the error.

    Raises:
        CodecMismatchError: they do not; says where.
    """
    end = 0
    for piece in sorted([*split.small, *split.alone], key=lambda piece: (piece.start, piece.stop)):
        if piece.start != end:
            raise CodecMismatchError(
                f"{label}: {piece.name} begins at element {piece.start} of its buffer, where {end} elements come before"
            )
        end = piece.stop
    if end != elements:
        raise CodecMismatchError(
            f"{label}: a buffer of {elements} elements was handed out for parameters of {end}: not each of them would "
            "be averaged"
        )


def batches(split: Split, dtype: DType) -> list[Split]:
    """Divide the pieces of a bucket into batches that travel together, in the order in which they start."""
    linear = [piece for piece in split.alone if piece.choice.codec.linear]
    others = [piece for piece in split.alone if not piece.choice.codec.linear]
    found = [Split([], group) for group in _groups(linear, _LINEAR_BATCH_BYTES // dtype.itemsize)]
    found += [Split([], group) for group in _groups(others, _BATCH_BYTES // dtype.itemsize)]
    if split.small:
        found = found or [Split([], [])]
        found[0] = Split(split.small, found[0].alone, split.small_as)
    return found


def _is_small(piece: Piece) -> bool:
    return not piece.choice.encodes and piece.size < _SMALL


def _pieces(
    policy: Asked,
    axis: str,
    dtype: DType,
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    step: int,
    stage: int | None,
    hosts: int | None,
    remembers: bool,
) -> Iterator[Piece]:
    start = 0
    together = sum(math.prod(shape) for _, shape in parameters) * dtype.itemsize
    for name, shape in parameters:
        n = math.prod(shape)
        nbytes = n * dtype.itemsize
        message = Message(
            axis,
            "all_reduce",
            "backward",
            dtype,
            nbytes,
            name,
            step,
            shape,
            stage,
            hosts=hosts,
            together=together,
            remembers=remembers,
        )
        yield Piece(name, shape, start, start + n, policy.choose(message))
        start += n


def _groups(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Yield groups of neighbours, of about ``most`` elements together."""
    group: list[Piece] = []
    for piece in pieces:
        group.append(piece)
        if sum(p.size for p in group) >= most:
            yield group
            group = []
    if group:
        yield group
