"""Mix this replica's parameters with those of its neighbours in a graph of the replicas only.

Ranks that have the same part of each replica gossip it, by a rule of :mod:`hybridcomp_lab.train.gossip`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.codecs import get_codec
from hybridcomp.collectives.stats import StatTable
from hybridcomp.policy import load_policy
from hybridcomp.torch.flat import views
from hybridcomp.torch.hook.averager import Averager
from hybridcomp.torch.registry import registry
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.gossip.choco import Choco
from hybridcomp_lab.train.gossip.event import EventGossip
from hybridcomp_lab.train.gossip.graph import make_graph
from hybridcomp_lab.train.gossip.neighbours import Neighbours
from hybridcomp_lab.train.gossip.powergossip import PowerGossip
from hybridcomp_lab.train.gossip.rules import PlainGossip, Rule, Tensors
from hybridcomp_lab.train.gossip.window import Window
from hybridcomp_lab.train.optimizer.apart import ApartUpdater, reports
from hybridcomp_lab.train.optimizer.spread import VALUES, Sample
from hybridcomp_lab.train.optimizer.update import Replicas
from hybridcomp_lab.train.parallel.stages import RankModel
from hybridcomp_lab.train.sync import Event, Gossip
from hybridcomp_lab.train.topology import Topology


class GossipUpdater(ApartUpdater):
    """Optimizer of this replica's parameters, followed by a rule of gossip.

    Args:
        how: method of gossip.
        model: stages of this rank.
        config, topology, traffic, stop_requested: see :class:`Updater`.

    Attributes:
        whole: mean of all replicas when it was last computed, by name; it is the model that is evaluated.
        rule: rule of gossip.
    """

    def __init__(
        self,
        how: Gossip | Event,
        model: RankModel,
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(model, config, topology, traffic, stop_requested)
        self._every = how.every
        group = topology.group("dp")
        mine = {name: parameter.detach() for name, parameter in self.parameters.items()}
        tensors = {name: tensor.numpy() for name, tensor in mine.items()}
        self.rule = _make_rule(how, tensors, group, config.dp)
        neighbours = self.rule.neighbours
        registry.add(neighbours)
        weakref.finalize(neighbours, _keep, neighbours.table).atexit = False
        self._averager = Averager(load_policy("none"), kind="mean", axis="dp", group=group)
        self._mean = torch.cat([tensor.reshape(-1) for tensor in mine.values()])
        parts = map(nn.Parameter, views(self._mean, mine.values()))
        self.whole = dict(zip(mine, parts, strict=True))
        self._sample = Sample(tensors, config.seed)

    def synchronise(self, step: int, *, last: bool) -> bool:
        """Mix with neighbours, see :class:`ApartUpdater`; all replicas meet for a report alone."""
        if (step + 1) % self._every == 0:
            self.rule.mix(step)
        met = reports(step, last=last)
        if met:
            self._sample.take()
        if step + 1 == self._config.steps:
            self._average()
            for name, parameter in self.parameters.items():
                parameter.data.copy_(self.whole[name].data)
        return met

    def _average(self) -> None:
        """Compute the mean of all replicas' parameters, exactly; collective."""
        shapes = [(name, tuple(tensor.shape)) for name, tensor in self.parameters.items()]
        for name, parameter in self.parameters.items():
            self.whole[name].data.copy_(parameter.data)
        averaging = self._averager.average(self._mean, lambda: shapes, "whole", 0)
        self._averager.flush()
        if averaging is not None:
            averaging.wait()

    def told(self) -> list[float]:
        """Return numbers for a report, see :class:`ApartUpdater`: a sample of parameters, then counts of messages."""
        counts = [float(n) for n in self.rule.messages] if isinstance(self.rule, EventGossip) else []
        return [*self._sample.values, *counts]

    def heard(self, everyone: Tensor) -> Replicas:
        """Return the spread of replicas and their share of suppressed messages, see :class:`ApartUpdater`."""
        values, counts = everyone[:, :VALUES], everyone[:, VALUES:].sum(0).tolist()
        suppressed = 1 - counts[1] / counts[0] if counts else None
        return Replicas(self._sample.spread(values, self._topology), suppressed)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the model compute with the mean of all replicas now, see :class:`Updater`; collective."""
        self._average()
        with super().evaluating():
            yield

    def state(self) -> dict[str, Tensor]:
        """Return each replica's state of the rule, see :class:`Updater`, after computing the mean. Collective."""
        self._average()
        place = f"dp{self._topology.dp}"
        return {f"{place}.{name}": torch.from_numpy(array) for name, array in self.rule.state().items()}


def _make_rule(how: Gossip | Event, tensors: Tensors, group: Any, replicas: int) -> Rule:
    """Make the rule, over a communicator of its own, which ends with the group."""
    from hybridcomp.collectives import Communicator  # noqa: PLC0415  (initialises MPI)

    ours = group.comm  # the group is one of hybridcomp's
    comm = Communicator(ours.mpi, "none", "dp", timeout=ours.timeout)
    group.beside.append(comm)
    graph = make_graph(how.graph, replicas)
    if isinstance(how, Event):
        sizes = [tensor.nbytes for tensor in tensors.values()]
        window = Window(comm, [graph.neighbours(rank) for rank in range(replicas)], sizes)
        group.beside.insert(0, window)  # freed before the communicator that it is made from
        neighbours = Neighbours(comm, graph, "put")
        return EventGossip(
            tensors,
            neighbours,
            window,
            horizon=how.horizon,
            warmup=how.warmup,
            reach=how.reach,
            stale=how.stale,
            ordered=how.reads == "ordered",
        )
    neighbours = Neighbours(comm, graph)
    if how.rule == "powergossip":
        return PowerGossip(tensors, neighbours, how.rank)
    if how.rule == "choco":
        return Choco(tensors, neighbours, get_codec(how.codec), how.gamma, alike=True)
    return PlainGossip(tensors, neighbours)


def _keep(table: StatTable) -> None:
    registry.keep(table.rows())
