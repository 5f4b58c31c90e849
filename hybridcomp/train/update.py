"""From gradients to the next weights: what a step's ranks tell each other, clipping, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hybridcomp.errors import DivergedError
from hybridcomp.train.config import TrainConfig
from hybridcomp.train.exchange import Exchange, gather_exactly
from hybridcomp.train.optim import (
    clip_gradients,
    global_norm,
    learning_rate,
    local_square_sums,
    make_optimizer,
    set_learning_rate,
)
from hybridcomp.train.sequence_parallel import sum_gradients
from hybridcomp.train.topology import Topology


@dataclass(frozen=True)
class Result:
    """A step whose update is done; the same on all ranks.

    Attributes:
        step: from 0.
        loss: mean over the replicas.
        rate: learning rate of the update.
        norm: of the whole gradient, before clipping.
        traffic: int64 [2, axes], bytes of all ranks up to the step: on the wire, and uncompressed.
        stop: whether a rank had been asked to stop when it reported the step.
    """

    step: int
    loss: float
    rate: float
    norm: float
    traffic: Tensor
    stop: bool


@dataclass(frozen=True)
class Report:
    """What the ranks say of a step's gradients, on its way to all of them."""

    step: int
    exchange: Exchange


class Updater:
    """AdamW on this rank's parameters, with the gradient clipped to a global norm.

    Args:
        parameters: what the optimizer updates, by name; their ``.grad`` is taken, and dropped afterwards.
        split: names of those that are split over tp.
        partial: names of those whose gradients are parts, which the ranks of tp sum.
        config: rates, decays, the limit of the norm.
        topology: the mesh.
        traffic: gives this rank's byte counters, int64 [2, axes].
        asked: tells whether this rank has been asked to stop.
        counted: names of those whose gradients are part of the norm: all but copies.

    Attributes:
        optimizer: the AdamW.
        parameters: as given.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        split: frozenset[str],
        partial: frozenset[str],
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        asked: Callable[[], bool],
        counted: frozenset[str],
    ) -> None:
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters, config)
        self._config = config
        self._topology = topology
        self._traffic = traffic
        self._asked = asked
        self._split = [p for name, p in parameters.items() if name in split]
        self._partial = [p for name, p in parameters.items() if name in partial]
        self._shared = [p for name, p in parameters.items() if name not in split]
        self._counted = [p for name, p in parameters.items() if name in counted - split]

    def complete_gradients(self) -> None:
        """Sum the gradients of which ranks of tp have parts; collective over tp, once a step, before all else."""
        if self._partial:
            sum_gradients(self._partial, self._topology.group("tp"))

    def square_sums(self) -> tuple[float, float]:
        """Sums of squares of this rank's gradients: of split parameters, and of the others."""
        return local_square_sums(self._split, self._counted)

    def report(self, step: int, loss: float, sums: tuple[float, float]) -> Report:
        """Start to tell all ranks about a step; collective.

        Args:
            step: from 0.
            loss: mean of this replica's batch, on its last stage; ignored elsewhere.
            sums: :meth:`square_sums` of the step's gradients.
        """
        return Report(step, Exchange([*sums, loss, float(self._asked())], self._traffic()))

    def result(self, report: Report) -> Result:
        """Wait for all ranks' reports of the step.

        Raises:
            DivergedError: on all ranks; the loss of one is not finite.
        """
        everyone = report.exchange.wait()
        _check_losses(self._topology, everyone[:, 2], report.step)
        return Result(
            report.step,
            mean_loss(self._topology, everyone[:, 2]),
            learning_rate(self._config, report.step),
            global_norm(self._topology, everyone[:, :2]),
            everyone[:, 4:].sum(0).view(2, -1).long(),
            bool(everyone[:, 3].any()),
        )

    def apply(self, step: int, norm: float) -> None:
        """Update every parameter that has a gradient, with the rate of ``step``; drop the gradients.

        The gradients are scaled to the configured limit where ``norm`` exceeds it. Where it is not finite the
        weights stay as they are.
        """
        parameters = [*self._split, *self._shared]
        if math.isfinite(norm):
            set_learning_rate(self.optimizer, learning_rate(self._config, step))
            clip_gradients(parameters, norm, self._config.clip)
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def own_norm(self) -> float:
        """Norm of the gradient of this rank's stages alone; collective over tp, equal on its ranks."""
        split, shared = self.square_sums()
        if self._topology.sizes["tp"] > 1:
            split = sum(gather_exactly(split, self._topology.group("tp")))
        return math.sqrt(split + shared)

    def update(self, step: int, loss: float) -> Result:
        """Complete, report, wait for all ranks, and apply: the whole update of a step at once; collective."""
        self.complete_gradients()
        result = self.result(self.report(step, loss, self.square_sums()))
        self.apply(step, result.norm)
        return result


def mean_loss(topology: Topology, losses: Tensor) -> float:
    """Mean over the replicas of the losses [ranks] that their last stages hold."""
    return float(losses[_holders(topology)].mean())


def _holders(topology: Topology) -> list[int]:
    """The ranks that hold the replicas' losses."""
    sizes = topology.sizes
    return [topology.rank_of(sizes["pp"] - 1, dp, 0) for dp in range(sizes["dp"])]


def _check_losses(topology: Topology, losses: Tensor, step: int) -> None:
    # A gradient that is not finite is skipped; weights that give such a loss will give no other one.
    for replica, rank in enumerate(_holders(topology)):
        if not math.isfinite(losses[rank]):
            raise DivergedError(
                f"step {step + 1}: the loss is {float(losses[rank])} on replica {replica} of "
                f"{topology.sizes['dp']}, computed by rank {rank}"
            )
