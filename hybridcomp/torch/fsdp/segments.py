"""Partition FSDP2's flat buffers into parameters' segments, each with the policy's choice.

A buffer has a part for each rank, and each part has a segment for each parameter of the module, padded to the same size
on all ranks. Codecs work on segments: blocks do not straddle parameters, and names count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridcomp.arrays import DType
from hybridcomp.codecs import get_codec
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice, Message, check_feedback
from hybridcomp.policy.adapt.adaptation import Asked

NONE = get_codec("none")


@dataclass(frozen=True, slots=True)
class Segment:
    """A parameter in a buffer.

    Attributes:
        name: name of the parameter.
        key: key of its error feedback: the name. A parameter split along another dim than the first is laid out anew
            for each number of ranks, and its key names both.
        start: its first element in a rank's part.
        size: its elements in a rank's part, padding included.
        total: its elements on all ranks, without padding, which comes last.
    """

    name: str
    key: str
    start: int
    size: int
    total: int

    @property
    def stop(self) -> int:
        """Return the index of the element after its last in a rank's part."""
        return self.start + self.size

    def count(self, rank: int) -> int:
        """Return its number of elements in a rank's part, without padding."""
        return max(0, min(self.size, self.total - rank * self.size))

    def span(self, rank: int) -> slice:
        """Return the range of a rank's elements in the whole parameter."""
        start = min(rank * self.size, self.total)
        return slice(start, start + self.count(rank))

    def whole(self, parts: Tensor) -> Tensor:
        """Return the whole parameter [total] of all ranks' parts [ranks, elements of a part]."""
        return parts[:, self.start : self.stop].reshape(-1)[: self.total]


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a rank's part of a buffer into encoded and exact segments.

    Attributes:
        size: elements of the part.
        exact: segments that travel uncompressed, each with the reason.
        encoded: the other segments, each with its codec and feedback.
    """

    size: int
    exact: list[tuple[Segment, Choice]] = field(default_factory=list)
    encoded: list[tuple[Segment, Choice]] = field(default_factory=list)

    def check(self, op: str, part: Tensor, whole: Tensor, ranks: int) -> None:
        """Check that the segments are all of a rank's part, and the parts of all ranks all of the buffer.

        Raises:
            CodecMismatchError: they are not.
        """
        if (part.numel(), whole.numel()) != (self.size, ranks * self.size):
            raise CodecMismatchError(
                f"{op} of FSDP2: a part of {part.numel()} elements in a buffer of {whole.numel()}, for parameters of "
                f"{self.size} on each of {ranks} ranks: not each of them would be carried"
            )

    @property
    def once(self) -> bool:
        """Tell whether a choice is for this time only."""
        return any(choice.once for _, choice in self.encoded)

    @property
    def reason(self) -> str:
        """Say why the exact segments are exact."""
        return "; ".join(dict.fromkeys(choice.reason for _, choice in self.exact))


def segments_of(parameters: Sequence[Any], names: dict[int, str], ranks: int) -> list[Segment]:
    """Return the segments of a rank's part.

    Args:
        parameters: FSDP2's ``FSDPParam`` objects, in the buffer's order.
        names: names of the parameters by ``id``.
        ranks: number of ranks that share the buffer.

    Returns:
        Segments in real numbers, of which a complex element is two.
    """
    found = []
    start = 0
    for parameter in parameters:
        name = names[id(parameter)]
        numbers = 2 if parameter.sharded_param.is_complex() else 1
        total = numbers * parameter._orig_size.numel()
        size = numbers * parameter.padded_sharded_param_size.numel()
        dim = parameter.fsdp_placement.dim
        key = name if dim == 0 else f"{name}@dim{dim}/{ranks}"
        found.append(Segment(name, key, start, size, total))
        start += size
    return found


def cut(
    policy: Asked,
    axis: str,
    op: str,
    phase: str,
    dtype: DType,
    segments: Sequence[Segment],
    *,
    ranks: int,
    step: int,
    hosts: int,
) -> Cut:
    """Ask the policy about each segment.

    Args:
        policy, axis: policy to ask, and mesh axis of the ranks.
        op: ``all_gather`` or ``reduce_scatter``.
        phase: forward or backward.
        dtype: dtype of the buffer.
        segments: segments of a rank's part, one after the other.
        ranks: number of ranks that share the buffer.
        step: step of training.
        hosts: number of hosts that the ranks are on.

    Raises:
        PolicyError: the feedback cannot serve the operation.
    """
    done = Cut(segments[-1].stop if segments else 0)
    sent = ranks if op == "reduce_scatter" else 1  # parts that a rank's own message is made of
    together = sent * done.size * dtype.itemsize
    for segment in segments:
        elements = sent * segment.size
        nbytes = elements * dtype.itemsize
        choice = policy.choose(
            Message(
                axis,
                op,
                phase,
                dtype,
                nbytes,
                segment.name,
                step,
                (elements,),
                hosts=hosts,
                together=together,
            )
        )
        if choice.codec.linear:
            choice = Choice(NONE, None, f"{choice.codec.name} only all-reduces")
        if choice.encodes:
            check_feedback(op, choice.codec, choice.feedback)
            done.encoded.append((segment, choice))
        else:
            done.exact.append((segment, choice))
    return done


def whole(size: int, reason: str) -> Cut:
    """Return the cut of a part that is sent uncompressed, in one segment."""
    return Cut(size, [(Segment("", "", 0, size, size), Choice(NONE, None, reason))])
