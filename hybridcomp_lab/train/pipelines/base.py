"""Define a schedule: the order of a step's forward and backward passes, and when the weights change."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from hybridcomp.policy import Policy
from hybridcomp_lab.train.config import EXCHANGE_MOMENTA, TrainConfig
from hybridcomp_lab.train.model.gpt import ModelShape
from hybridcomp_lab.train.optimizer.momentum import exchanging_optimizer
from hybridcomp_lab.train.optimizer.optimizers import parameter_groups
from hybridcomp_lab.train.optimizer.streamed import StreamedUpdater
from hybridcomp_lab.train.optimizer.update import Result, Updater
from hybridcomp_lab.train.parallel.neurons import find_thresholds
from hybridcomp_lab.train.parallel.residual_stream import stream_of
from hybridcomp_lab.train.parallel.stages import RankModel, build_model, rehearse
from hybridcomp_lab.train.pipelines.evaluation import evaluate
from hybridcomp_lab.train.sync import DiLoCo, Elastic, Event, Gossip, parse_sync
from hybridcomp_lab.train.topology import Topology, decide_together

if TYPE_CHECKING:
    from hybridcomp_lab.train.start import Job


class BatchOf(Protocol):
    """Function that gives this replica's batch of a step."""

    def __call__(self, step: int, shares: Sequence[int] | None = None, /) -> Tensor:
        """Return the batch."""


@dataclass(frozen=True)
class Run:
    """Components from which a schedule is made.

    Attributes:
        model: stages of this rank.
        shape: sizes of the whole model.
        config: configuration of the run.
        policy: policy of compression.
        topology: mesh of the ranks.
        batch: function that returns this replica's batch of a step (from 0): int64
            [micro_batches * micro_batch_size, seq_len + 1]; with this replica's number of micro-batches in the second
            argument, the shares of all replicas, where that is given and not None.
        traffic: function that returns this rank's byte counters, int64 [2, axes].
        stop_requested: function that tells whether this rank has been asked to stop.
    """

    model: RankModel
    shape: ModelShape
    config: TrainConfig
    policy: Policy
    topology: Topology
    batch: BatchOf
    traffic: Callable[[], Tensor]
    stop_requested: Callable[[], bool]

    @classmethod
    def of(
        cls,
        job: Job,
        topology: Topology,
        traffic: Callable[[], Tensor] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> Run:
        """Make the components of a job's schedule, its model built and rehearsed; collective.

        Args:
            job: job to train; its process group is up.
            topology: mesh of the job.
            traffic: see the attributes; by default nothing is counted.
            stop_requested: see the attributes.
        """
        config, shape = job.config, ModelShape.of(job.identity)
        decide_together(topology, config, job.policy)
        model = build_model(shape, config, job.policy, topology)
        rehearse(model, config)
        find_thresholds(model, config, topology)
        nothing = torch.zeros(2, len(config.axes), dtype=torch.int64)

        def batch(step: int, shares: Sequence[int] | None = None) -> Tensor:
            return torch.from_numpy(job.batches.train(step, topology.dp, shares))

        return cls(
            model, shape, config, job.policy, topology, batch, traffic or (lambda: nothing), stop_requested
        )

    def updater(
        self, parameters: Mapping[str, nn.Parameter] | None = None, *, apart: frozenset[str] = frozenset()
    ) -> Updater:
        """Make the updater of the model's own parameters, or of those given; ``apart`` are this replica's alone."""
        mine = self.model.parameters if parameters is None else parameters
        model = self.model
        about = self.config, self.topology, self.traffic, self.stop_requested
        if self.config.sync is not None:
            # They import this module.
            from hybridcomp_lab.train.optimizer.elastic import ElasticUpdater  # noqa: PLC0415
            from hybridcomp_lab.train.optimizer.gossiping import GossipUpdater  # noqa: PLC0415
            from hybridcomp_lab.train.optimizer.synced import SyncedUpdater  # noqa: PLC0415

            how = parse_sync(self.config.sync)
            if isinstance(how, Gossip | Event):
                return GossipUpdater(how, model, *about)
            assert isinstance(how, DiLoCo)
            if isinstance(how, Elastic):
                return ElasticUpdater(how, model, self.policy, *about)
            return SyncedUpdater(how, model, self.policy, *about)
        if model.streamed is not None:
            return StreamedUpdater(model.streamed, mine, *about)
        if self.config.shard == "zero1":
            from hybridcomp_lab.train.optimizer.zero import ShardedUpdater, Shards  # noqa: PLC0415  (imports FSDP2: a second)

            alike = {name: p for name, p in mine.items() if name not in model.apart}
            own = {name: p for name, p in mine.items() if name in model.apart}
            shards = Shards(alike, self.topology.group("dp"), self.policy, self.config.bucket_mb)
            return ShardedUpdater(shards, own, model.split, model.partial, *about)
        optimizer = None
        if self.config.optimizer in EXCHANGE_MOMENTA:
            groups = parameter_groups(mine, self.config)
            optimizer = exchanging_optimizer(groups, self.config, self.policy, model.stages[0])
        return Updater(
            mine,
            model.split,
            *about,
            partial=model.partial,
            copies=model.copies,
            apart=model.apart | apart,
            spread=model.apart,
            optimizer=optimizer,
        )


class Schedule(abc.ABC):
    """Schedule that runs training steps.

    Collective: every rank calls the same methods in the same order.

    Args:
        run: components of the run.
        updater: updater that changes the weights.

    Attributes:
        run: as given.
        updater: as given; its parameters are the newest weights.
    """

    def __init__(self, run: Run, updater: Updater) -> None:
        self.run = run
        self.updater = updater

    @abc.abstractmethod
    def train(self, step: int, *, last: bool) -> list[Result]:
        """Run the passes of a step.

        Args:
            step: step from 0; one more than in the call before.
            last: whether an evaluation, a checkpoint or the end follows: nothing of later steps is begun, and
                every update is done on return.

        Returns:
            The results of the steps whose updates were done, in order. A schedule may be some steps behind unless
            ``last``.

        Raises:
            CollectiveTimeoutError: a message did not come within the configuration's timeout.
        """

    def evaluate(self, micro_batches: Sequence[Tensor]) -> float:
        """Evaluate the newest weights, by forward passes alone.

        It follows a step with ``last``, or precedes all.

        Args:
            micro_batches: each int64 [micro_batch_size, seq_len + 1].

        Returns:
            Their mean loss on the last stage, 0 elsewhere.
        """
        with torch.no_grad(), self.updater.evaluating():
            return evaluate(
                self.run.model.stages, stream_of(self.run.config), self.run.topology, micro_batches
            )

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs beyond weights and moments; loaded in place."""
        return self.updater.state()

    def resume(self, step: int) -> None:
        """Go on after so many steps, with the state that was loaded."""
        for stage in self.run.model.stages:
            if stage.hook is not None:
                stage.hook.resume(step)
        self.updater.resume(step)

    @abc.abstractmethod
    def peaks(self) -> dict[str, int]:
        """Return the most that this rank held at once.

        These are ``weight_versions``, and ``stashes``, forward passes whose backward was to come, each of one stage
        and micro-batch.
        """
