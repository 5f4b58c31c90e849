"""Compute the next weights from gradients: exchange a step's sums between ranks, clip, apply the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridcomp.errors import DivergedError
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.optimizers import (
    clip_gradients,
    global_norm,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    square_sum,
)
from hybridcomp_lab.train.parallel.exchange import Exchange, sum_exactly
from hybridcomp_lab.train.parallel.sequence_parallel import sum_gradients
from hybridcomp_lab.train.topology import Topology


@dataclass(frozen=True)
class Replicas:
    """State of replicas that train apart, at the ranks' report of it.

    Attributes:
        spread: RMS distance of their parameters from the mean of all, over the RMS of the parameters; an estimate
            (:mod:`.spread`), before any average of all. None where they do not gossip.
        suppressed: share of all tensors up to then that were not sent, as they had not changed by enough; None where
            all are sent.
        shares: micro-batches of each replica from then on; None where all have the same.
    """

    spread: float | None = None
    suppressed: float | None = None
    shares: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """Return the state as text for people."""
        told = []
        if self.spread is not None:
            told.append(f"replicas apart by {100 * self.spread:.3g} %")
        if self.suppressed is not None:
            told.append(f"{100 * self.suppressed:.1f} % of messages suppressed")
        if self.shares is not None:
            told.append(f"micro-batches {' '.join(map(str, self.shares))}")
        return ", ".join(told)


@dataclass(frozen=True)
class Result:
    """Result of a step whose update is done; the same on all ranks.

    Attributes:
        step: step from 0.
        loss: mean loss over the replicas.
        rate: learning rate of the update.
        norm: norm of the whole gradient, before clipping.
        traffic: int64 [2, axes], bytes of all ranks up to the step: on the wire, and uncompressed.
        stop: whether a rank had been asked to stop when it reported the step.
        replicas: state of replicas that gossip or have shares, after the newest step of a report; else None.
    """

    step: int
    loss: float
    rate: float
    norm: float
    traffic: Tensor
    stop: bool
    replicas: Replicas | None = None


@dataclass(frozen=True)
class Report:
    """Report of the ranks about a step's gradients, on its way to all of them."""

    step: int
    exchange: Exchange


class Updater:
    """Optimizer of this rank's parameters, with the gradient clipped to a global norm.

    Args:
        parameters: parameters to update, by name; their ``.grad`` is taken, and dropped afterwards.
        split: names of parameters that are split over tp.
        config: configuration with rates, decays and the limit of the norm.
        topology: mesh of the ranks.
        traffic: function that returns this rank's byte counters, int64 [2, axes].
        stop_requested: function that tells whether this rank has been asked to stop.
        partial: names of parameters whose gradients are parts, which the ranks of tp sum.
        copies: names of parameters that are copies of others, whose gradients count in the norm.
        apart: names of parameters that this replica alone has.
        whole: parameters of the model, by name, of which this rank updates only a flat part.
        spread: names of parameters of which each replica has a part.
        optimizer: optimizer of the parameters; None: make it.

    Attributes:
        optimizer: optimizer that the configuration names.
        parameters, apart, whole: as given.
        gradient_bytes: most bytes of gradients, or of data in their place, when they were applied.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        split: frozenset[str],
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
        *,
        partial: frozenset[str] = frozenset(),
        copies: frozenset[str] = frozenset(),
        apart: frozenset[str] = frozenset(),
        whole: Mapping[str, nn.Parameter] | None = None,
        spread: frozenset[str] = frozenset(),
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.parameters = parameters
        self.apart = apart
        self.whole = whole or {}
        names = list({**self.whole, **parameters})
        totals = _WholeSums(parameters, names, {"dp": spread, "tp": split}, topology)
        self.optimizer = optimizer or make_optimizer(parameters, config, whole, totals)
        self.gradient_bytes = 0
        self._config = config
        self._topology = topology
        self._traffic = traffic
        self._stop_requested = stop_requested
        alike = {name: p for name, p in parameters.items() if name not in apart}
        self._partial = [p for name, p in {**parameters, **self.whole}.items() if name in partial]
        self._split = [p for name, p in alike.items() if name in split]
        self._shared = [p for name, p in alike.items() if name not in split | copies]
        # All ranks of tp have the parameters that tp does not split: the first one's count.
        self._apart = [
            p for name, p in parameters.items() if name in apart and (name in split or topology.tp == 0)
        ]

    def begin(self) -> Sequence[int] | None:
        """Begin a step, before its passes; return the micro-batches of each replica, None: as configured."""
        return None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        return learning_rate(self._config, step)

    def complete_gradients(self) -> None:
        """Sum the gradients of which ranks have parts; collective, once a step, before all else."""
        if self._partial:
            sum_gradients(self._partial, self._topology.group("tp"))

    def square_sums(self) -> tuple[float, float, float]:
        """Return sums of squares of this rank's gradients.

        They cover split parameters, shared ones, and the ones of this replica alone that count here.
        """
        return square_sum(self._split), square_sum(self._shared), square_sum(self._apart)

    def report(self, step: int, loss: float, sums: tuple[float, float, float]) -> Report:
        """Start to tell all ranks about a step; collective.

        Args:
            step: step from 0.
            loss: mean loss of this replica's batch, on its last stage; ignored elsewhere.
            sums: :meth:`square_sums` of the step's gradients.
        """
        return Report(step, Exchange([*sums, loss, float(self._stop_requested())], self._traffic()))

    def result(self, report: Report) -> Result:
        """Wait for all ranks' reports of the step.

        Raises:
            DivergedError: the loss of a replica is not finite; on all ranks.
        """
        everyone = report.exchange.wait()
        losses = everyone[:, 3]
        check_losses(self._topology, losses, report.step)
        return Result(
            report.step,
            mean_loss(self._topology, losses),
            learning_rate(self._config, report.step),
            global_norm(self._topology, everyone[:, :3]),
            everyone[:, 5:].sum(0).view(2, -1).long(),
            bool(everyone[:, 4].any()),
        )

    def apply(self, step: int, norm: float) -> None:
        """Update every parameter that has a gradient, with the rate of ``step``; drop the gradients.

        The gradients are scaled to the configured limit where ``norm`` exceeds it. Where it is not finite the
        weights stay as they are.
        """
        parameters = list(self.parameters.values())
        self.gradient_bytes = max(self.gradient_bytes, self.held_bytes())
        if math.isfinite(norm):
            set_learning_rate(self.optimizer, self.rate(step))
            clip_gradients(parameters, norm, self._config.clip)
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def held_bytes(self) -> int:
        """Return the bytes of this rank's gradients, or of data in their place."""
        return sum(p.grad.nbytes for p in self.parameters.values() if p.grad is not None)

    def own_norm(self) -> float:
        """Compute the norm of the gradient of this rank's stages alone; collective over tp, equal on its ranks."""
        split, shared, _ = self.square_sums()
        return math.sqrt(self._summed(split, "tp") + shared)

    def _summed(self, value: float, *axes: str) -> float:
        """Sum a number over the ranks of axes of the mesh, exactly alike on all of them; collective."""
        total = torch.tensor([value], dtype=torch.float64)
        for axis in axes:
            if self._topology.sizes[axis] > 1:
                total = sum_exactly(total, self._topology.group(axis))
        return float(total)

    def update(self, step: int, loss: float, *, last: bool) -> list[Result]:
        """Complete, report, wait for all ranks, and apply: the whole update of a step at once; collective.

        Args:
            step, loss: see :meth:`report`.
            last: see :meth:`hybridcomp_lab.train.pipelines.Schedule.train`.

        Returns:
            The results of the steps of which all ranks have reported: here this one.
        """
        self.complete_gradients()
        result = self.result(self.report(step, loss, self.square_sums()))
        self.apply(step, result.norm)
        return [result]

    def sizes(self) -> dict[str, int]:
        """Return the elements of the parameters that this rank updates, by name."""
        return {name: p.numel() for name, p in self.parameters.items()}

    def counts(self, name: str) -> bool:
        """Tell whether a parameter of this rank counts as one of the model's: one of all ranks' copies does."""
        return self._topology.dp == 0 or name in self.apart

    def evaluating(self) -> AbstractContextManager[None]:
        """Have the model compute with the parameters to evaluate, within a block."""
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs beyond parameters and moments; loaded in place."""
        return {}

    def resume(self, step: int) -> None:
        """Go on after so many steps, with state that was loaded."""


def mean_loss(topology: Topology, losses: Tensor) -> float:
    """Return the mean over the replicas of the losses [ranks] that their last stages hold."""
    return float(losses[_holders(topology)].mean())


def _holders(topology: Topology) -> list[int]:
    """Return the ranks that hold the replicas' losses."""
    sizes = topology.sizes
    return [topology.rank_of(sizes["pp"] - 1, dp, 0) for dp in range(sizes["dp"])]


def check_losses(topology: Topology, losses: Tensor, step: int) -> None:
    """Check that the losses [ranks] of a step, from 0, are finite.

    Raises:
        DivergedError: the loss of a replica is not.
    """
    # A step whose gradient is not finite is skipped; weights that give such a loss will give no other one.
    for replica, rank in enumerate(_holders(topology)):
        if not math.isfinite(losses[rank]):
            raise DivergedError(
                f"step {step + 1}: the loss is {float(losses[rank])} on replica {replica} of "
                f"{topology.sizes['dp']}, computed by rank {rank}"
            )


class _WholeSums:
    """Sums over whole tensors, from those over this rank's parts: :data:`hybridcomp_lab.train.optimizer.lans.Totals`.

    Args:
        parameters: parameters of this rank, by name.
        names: names of all tensors of which its replica's ranks, or the replicas, have parts; alike on them.
        over: names of the tensors that are split over an axis of the mesh, by axis; ``tp`` and ``dp``.
        topology: mesh of the ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: Collection[str],
        over: Mapping[str, Collection[str]],
        topology: Topology,
    ) -> None:
        place = {name: i for i, name in enumerate(names)}
        self._places = {parameter: place[name] for name, parameter in parameters.items()}
        self._count = len(place)
        self._over = [
            (topology.group(axis), [i for name, i in place.items() if name in split])
            for axis, split in over.items()
            if topology.sizes[axis] > 1 and any(name in split for name in place)
        ]

    def __call__(self, parameters: Sequence[nn.Parameter], sums: Tensor) -> Tensor:
        """Return sums over whole tensors, fp64 [sums, parameters], given those over these parameters; collective."""
        mine = [self._places[parameter] for parameter in parameters]
        everyone = sums.new_zeros(len(sums), self._count)
        everyone[:, mine] = sums
        for group, places in self._over:
            everyone[:, places] = sum_exactly(everyone[:, places], group)
        return everyone[:, mine]
