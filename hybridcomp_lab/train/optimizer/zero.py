"""Keep the optimizer's moments, and weights of full precision, for each replica's part of the parameters only: ZeRO-1.

After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054), stage 1. After a step's last backward pass:

1.  The gradients are reduced and scattered: each replica gets the mean of its part.
2.  Each replica updates its part.
3.  The parts are gathered. All replicas, the owner too, compute with the values of these messages: they have the
    same bits whatever the policy makes of them, and the owner's part is never rounded.

A part has a piece of every parameter, whose elements in a row are cut into as many equal pieces as there are replicas,
the last one padded. So messages have parameters' names, for ``exclude`` and for error feedback; they are those of
:func:`hybridcomp.torch.compress_fsdp`, on the axis ``dp``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.answers import Answers
from hybridcomp.policy import Policy
from hybridcomp.torch.adapting import Adapting
from hybridcomp.torch.fsdp.collectives import Collectives
from hybridcomp.torch.fsdp.segments import Cut, Segment, cut
from hybridcomp.torch.fsdp.state import open_collectives
from hybridcomp.torch.memory import Arrays, pack, unpack
from hybridcomp.torch.registry import registry
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.update import Result, Updater
from hybridcomp_lab.train.topology import Topology

_AXIS = "dp"


class Shards:
    """Part of this replica in parameters that all replicas hold.

    Args:
        parameters: parameters by name; the same on all replicas.
        group: process group of the replicas.
        policy: policy whose section ``dp`` says how the messages are compressed.
        bucket_mb: MiB of gradients that are sent together, at most.

    Attributes:
        parameters: as given.
        leaves: flat pieces that the optimizer updates, by name. Parameters of which this replica has none are not
            there.
        label: name in a saved state.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        policy: Policy,
        bucket_mb: float,
    ) -> None:
        self.parameters = parameters
        self.label = f"zero:{_AXIS}"
        self._policy = policy
        self._feedback = ErrorFeedback(form=None)
        self._collectives = open_collectives(group, _AXIS, policy, self._feedback)
        self._rank, self._ranks = self._collectives.rank, self._collectives.size
        self._step = 0
        self._cuts: Answers[Cut] = Answers()
        self._adapting = Adapting(policy, _AXIS, "reduce_scatter", self._collectives.starter)
        self._buckets = list(self._fill(bucket_mb * 2**20))
        self.leaves: dict[str, nn.Parameter] = {}
        for segment in (segment for bucket in self._buckets for segment in bucket):
            if segment.count(self._rank):
                whole = parameters[segment.name].detach().flatten()
                self.leaves[segment.name] = nn.Parameter(whole[segment.span(self._rank)].clone())
        registry.add(self)
        weakref.finalize(self, _keep, self._collectives).atexit = False

    def _fill(self, limit: float) -> Iterator[list[Segment]]:
        """Yield the parameters' pieces in buckets, whose gradients have ``limit`` bytes at most, or one parameter."""
        bucket: list[Segment] = []
        start, held = 0, 0
        for name, parameter in self.parameters.items():
            if bucket and held + parameter.nbytes > limit:
                yield bucket
                bucket, start, held = [], 0, 0
            size = math.ceil(parameter.numel() / self._ranks)
            bucket.append(Segment(name, name, start, size, parameter.numel()))
            start += size
            held += parameter.nbytes
        yield bucket

    def reduce(self) -> None:
        """Reduce the gradients' mean to the leaves, each replica its pieces; drop the gradients.

        Collective.
        """
        observed = self._adapting.begin(self._step)
        for number, bucket in enumerate(self._buckets):
            found = self._cut("reduce_scatter", number)
            given = self._empty(self._ranks * found.size)
            parts, mine = given.view(self._ranks, -1), self._empty(found.size)
            for segment in bucket:
                parameter = self.parameters[segment.name]
                assert parameter.grad is not None
                flat = parameter.grad.flatten()
                room = self._ranks * segment.size - segment.total
                parts[:, segment.start : segment.stop] = functional.pad(flat, (0, room)).view(self._ranks, -1)
                parameter.grad = None
            if observed:
                self._collectives.observe(self._adapting, given, found, self._feedback)
            self._collectives.reduce_scatter(mine, given, found, dist.ReduceOp.SUM)
            mine /= self._ranks
            for leaf, piece in self._pieces(bucket, mine):
                leaf.grad = piece

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the leaves' values on all replicas. Collective."""
        for number, bucket in enumerate(self._buckets):
            found = self._cut("all_gather", number)
            mine = torch.zeros_like(self._empty(found.size))
            for leaf, piece in self._pieces(bucket, mine):
                piece.copy_(leaf)
            everyone = self._empty(self._ranks * found.size)
            self._collectives.all_gather(everyone, mine, found, "forward").wait()
            parts = everyone.view(self._ranks, -1)
            for segment in bucket:
                flat = parts[:, segment.start : segment.stop].flatten()[: segment.total]
                parameter = self.parameters[segment.name]
                parameter.copy_(flat.view_as(parameter))

    def _pieces(self, bucket: list[Segment], mine: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield leaves of a bucket, and their places in this replica's part of it."""
        for segment in bucket:
            if segment.name in self.leaves:
                stop = segment.start + segment.count(self._rank)
                yield self.leaves[segment.name], mine[segment.start : stop]

    def _cut(self, op: str, number: int) -> Cut:
        """Return the cut of a bucket by the policy in this step."""
        starter = self._collectives.starter

        def made() -> Cut:
            phase = "backward" if op == "reduce_scatter" else "forward"
            dtype = as_dtype(self._empty(0).dtype)
            return cut(
                self._adapting.asked,
                _AXIS,
                op,
                phase,
                dtype,
                self._buckets[number],
                ranks=self._ranks,
                step=self._step,
                hosts=self._collectives.hosts,
            )

        alike = (op, number, self._policy.same_as_step(self._step))
        return self._cuts.get(starter, alike, made, adapted=self._adapting.version)

    def _empty(self, size: int) -> Tensor:
        return next(iter(self.parameters.values())).new_empty(size, requires_grad=False)

    # -- memory and statistics (hybridcomp.torch.registry.Member) --------------------------------------

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self._collectives.rows()

    def memory(self) -> Arrays:
        """Return the arrays of error feedback, the step and the decisions."""
        return pack(self._feedback, {}, self._step, self._adapting.memory())

    def load_memory(self, arrays: Arrays) -> None:
        """Load the arrays that :meth:`memory` returned."""
        self._step, decided = unpack(arrays, self._feedback, {})
        self._adapting.load_memory(decided)

    def advance(self) -> None:
        """Count a training step that has ended."""
        self._step += 1


def _keep(collectives: Collectives) -> None:
    registry.keep(collectives.rows())


class ShardedUpdater(Updater):
    """Optimizer of this replica's part of the parameters.

    Args:
        shards: part of this replica.
        own: parameters that no other replica has, by name.
        split: names of the parameters that are split over tp.
        partial: names of parameters whose gradients are parts, which the ranks of tp sum.
        config, topology, traffic, stop_requested: see :class:`Updater`.
    """

    def __init__(
        self,
        shards: Shards,
        own: Mapping[str, nn.Parameter],
        split: frozenset[str],
        partial: frozenset[str],
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        mine = {**shards.leaves, **own}
        about = config, topology, traffic, stop_requested
        super().__init__(
            mine,
            split,
            *about,
            partial=partial,
            apart=frozenset(mine),
            whole=shards.parameters,
            spread=frozenset(shards.parameters).union(own),
        )
        self._shards = shards

    def complete_gradients(self) -> None:
        """Complete gradients, see :class:`Updater`; then give each replica its part of the mean."""
        super().complete_gradients()
        self._shards.reduce()

    def update(self, step: int, loss: float, *, last: bool) -> list[Result]:
        """Do the whole update of a step; collective."""
        results = super().update(step, loss, last=last)
        if math.isfinite(results[0].norm):
            self._shards.gather()
        return results
