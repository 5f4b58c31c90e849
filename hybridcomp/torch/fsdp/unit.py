"""One module of FSDP2: its parameters, its counts of steps, and how its buffers are cut."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives.answers import Answers
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Policy
from hybridcomp.torch.adapting import Adapting
from hybridcomp.torch.backend.op_kinds import op_kind
from hybridcomp.torch.flat import as_real
from hybridcomp.torch.fsdp.collectives import Collectives
from hybridcomp.torch.fsdp.leftovers import Leftovers
from hybridcomp.torch.fsdp.reference import Reference
from hybridcomp.torch.fsdp.segments import Cut, Segment, cut, segments_of, whole
from hybridcomp.torch.hook.averager import Averager, Named
from hybridcomp.torch.phases import phase

Tensor = torch.Tensor


class Owner(Protocol):
    """Compression of the model that a unit is a part of, as far as the unit uses it: see :class:`.FSDPCompression`."""

    policy: Policy
    axis: str
    difference: bool
    feedback: ErrorFeedback
    leftovers: Leftovers

    @property
    def compresses_replicas(self) -> bool:
        """Tell whether the policy compresses what replicas average."""

    def collectives(self, group: Any) -> Collectives:
        """Return the collectives of a group."""

    def adapting(self, group: Any) -> Adapting:
        """Return the choices of a group's reductions."""

    def replicas(self, group: Any) -> Averager:
        """Return the averager of a group of replicas."""


class Unit:
    """A group of parameters that FSDP2 communicates together.

    Attributes:
        name: name of its module.
        step: number of reductions so far.
        group: the process group of the ranks that share its parameters.
        reference: reference of differences; None if parameters themselves are sent.
    """

    def __init__(
        self, owner: Owner, name: str, parameters: list[Any], names: dict[int, str], group: Any
    ) -> None:
        self.name = name
        self.step = 0
        self.group = group
        self.reference = Reference() if owner.difference else None
        self._owner = owner
        self._parameters = parameters
        self._names = names
        self._cuts: Answers[Cut] = Answers()

    @property
    def segments(self) -> list[Segment]:
        """Return the segments of all parameters."""
        return segments_of(self._parameters, self._names, self.group.size())

    def all_gather(self, output: Tensor, own: Tensor, group: Any) -> Any:
        """Start to gather parameters; return the work, or None if they are there."""
        output, own = as_real(output), as_real(own)
        collectives = self._owner.collectives(group)
        if group is not self.group:
            again = whole(own.numel(), "parameters that were gathered before, within a smaller mesh")
            return collectives.all_gather(output, own, again, phase())
        found = self._cut("all_gather", self._parameters, own)
        if self.reference is not None and found.encoded:
            return self.reference.all_gather(collectives, output, own, found, phase())
        return collectives.all_gather(output, own, found, phase())

    def reduce_scatter(
        self, output: Tensor, given: Tensor, group: Any, op: Any, parameters: list[Any] | None
    ) -> None:
        """Reduce gradients.

        Args:
            output: this rank's part.
            given: all parts; may be overwritten.
            group: process group of FSDP2.
            op: torch's reduce operation.
            parameters: parameters that have gradients; None if they are not known.
        """
        output, given = as_real(output), as_real(given)
        if parameters is None:
            parameters = [p for p in self._parameters if p.sharded_param.requires_grad]
        collectives, adapting = self._owner.collectives(group), self._owner.adapting(group)
        observed = adapting.begin(self.step)
        found = self._cut("reduce_scatter", parameters, output)
        if observed:
            collectives.observe(adapting, given, found, self._owner.feedback)
        collectives.reduce_scatter(output, given, found, op)
        self._owner.leftovers.add(output, found, group.size() if op_kind(op) == dist.ReduceOp.AVG else 1)
        self.step += 1

    @property
    def compresses_replicas(self) -> bool:
        """Tell whether the policy compresses what replicas of the shards reduce."""
        return self._owner.compresses_replicas

    def all_reduce(self, output: Tensor, group: Any, parameters: list[Any]) -> None:
        """Average this rank's part of gradients over the replicas of its shard, in place.

        Args:
            output: this rank's part.
            group: process group of the replicas.
            parameters: parameters that have gradients.
        """
        output = as_real(output)
        averager = self._owner.replicas(group)

        def named() -> Named:
            segments = segments_of(parameters, self._names, self.group.size())
            return [(segment.key, (segment.size,)) for segment in segments]

        key = (self.name, output.dtype, *map(id, parameters))
        averaging = averager.average(output, named, key, self.step)
        if averaging is not None:
            averager.flush()
            averaging.wait()

    def _cut(self, op: str, parameters: list[Any], part: Tensor) -> Cut:
        """Return the cut of a rank's part of a buffer, made on first use."""
        starter = self._owner.collectives(self.group).starter
        when = phase() if op == "all_gather" else "backward"
        key = (
            op,
            when,
            part.dtype,
            part.numel(),
            self._owner.policy.same_as_step(self.step),
            *map(id, parameters),
        )
        adapted = self._owner.adapting(self.group).version
        return self._cuts.get(starter, key, lambda: self._made(op, when, parameters, part), adapted=adapted)

    def _made(self, op: str, when: str, parameters: list[Any], part: Tensor) -> Cut:
        try:
            dtype = as_dtype(part.dtype)
        except CodecMismatchError:
            return whole(part.numel(), f"no message names {part.dtype}")
        if not dtype.is_float:
            return whole(part.numel(), "parameters of several dtypes travel as bytes")
        segments = segments_of(parameters, self._names, self.group.size())
        if sum(segment.size for segment in segments) != part.numel():
            return whole(part.numel(), "what is sent is not the parameters, or not all have a gradient")
        owner, ranks = self._owner, self.group.size()
        collectives = owner.collectives(self.group)
        hosts, asked = collectives.hosts, owner.adapting(self.group).asked
        return cut(asked, owner.axis, op, when, dtype, segments, ranks=ranks, step=self.step, hosts=hosts)
