"""Rules of gossip by their formulas, on the tensors of all ranks at once; NumPy alone, of any floating-point type."""

from __future__ import annotations

from typing import Any

import numpy as np

import hybridcomp as hc
from hybridcomp_lab.train.gossip.graph import Graph

Weights = dict[str, np.ndarray[Any, Any]]
Factors = dict[tuple[int, int, str], np.ndarray[Any, Any]]


class Plain:
    """Plain mixing: x_i becomes the sum of W_ij x_j."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def mix(self, all_: list[Weights], step: int) -> list[Weights]:
        """Return the tensors of all ranks after a mixing."""
        return times(self.graph.matrix, all_)


class Choco:
    """Compressed differences to estimates that all ranks know.

    Args:
        graph: graph of the ranks.
        codec: spec of the codec.
        gamma: factor of each move.
        known: estimates at the beginning.
    """

    def __init__(self, graph: Graph, codec: str, gamma: float, known: list[Weights]) -> None:
        self.graph, self.codec, self.gamma, self.known = graph, hc.get_codec(codec), gamma, known

    def mix(self, all_: list[Weights], step: int) -> list[Weights]:
        """Return the tensors of all ranks after a mixing."""
        for x, estimate in zip(all_, self.known, strict=True):
            for name, value in x.items():
                message = self.codec.at_step(step).encode(value - estimate[name])
                estimate[name] = estimate[name] + hc.decode(message).reshape(value.shape)
        towards = times(self.gamma * (self.graph.matrix - np.eye(self.graph.ranks)), self.known)
        return [{n: x[n] + move[n] for n in x} for x, move in zip(all_, towards, strict=True)]


class PowerGossip:
    """Projections of pairs' differences onto factors that the mixing before has found.

    Args:
        graph: graph of the ranks.
        factors: p of each edge and matrix before the first mixing; other tensors are exchanged whole.
    """

    def __init__(self, graph: Graph, factors: Factors) -> None:
        self.graph, self.factors, self.side = graph, factors, 0

    def mix(self, all_: list[Weights], step: int) -> list[Weights]:
        """Return the tensors of all ranks after a mixing."""
        moved = [{name: tensor.copy() for name, tensor in x.items()} for x in all_]
        for i, j in self.graph.edges:
            for name, lower in all_[i].items():
                move = all_[j][name] - lower
                if (i, j, name) in self.factors:
                    move = self.projected(move, (i, j, name))
                move = self.graph.rate * self.graph.matrix[i, j] * move
                moved[i][name] = moved[i][name] + move
                moved[j][name] = moved[j][name] - move
        self.side = 1 - self.side
        return moved

    def projected(self, difference: np.ndarray[Any, Any], key: tuple[int, int, str]) -> np.ndarray[Any, Any]:
        """Return the part of a difference in the span of its factor, and take another factor for it."""
        flat = difference.reshape(len(difference), -1)
        facing = flat.T if self.side else flat
        p = self.factors[key]
        self.factors[key] = facing.T @ p
        facing = p @ np.linalg.pinv(p) @ facing
        return (facing.T if self.side else facing).reshape(difference.shape)


class Event:
    """Mixing with what neighbours have last sent: a tensor goes when it has moved by its threshold.

    Args:
        graph: graph of the ranks.
        start: the tensors of all ranks at the beginning.
        horizon, warmup, reach, stale: settings of the rule.

    Attributes:
        sent: tensors of each rank as its neighbours know them.
        messages: for each rank, how many tensors it might have sent to its neighbours, and how many it has.
    """

    def __init__(
        self, graph: Graph, start: list[Weights], horizon: float, warmup: int, reach: float, stale: str
    ) -> None:
        self.graph, self.horizon, self.warmup, self.reach, self.mixings = graph, horizon, warmup, reach, 0
        self.stale = stale
        self.sent = [{name: tensor.copy() for name, tensor in x.items()} for x in start]
        self.states = [{name: (0.0, [0.0, 0.0], -1) for name in x} for x in start]  # threshold, slopes, last
        self.messages = [[0, 0] for _ in start]

    def mix(self, all_: list[Weights], step: int) -> list[Weights]:
        """Return the tensors of all ranks after a mixing."""
        for rank, x in enumerate(all_):
            degree = len(self.graph.neighbours(rank))
            for name, value in x.items():
                threshold, slopes, last = self.states[rank][name]
                threshold *= self.horizon
                moved = float(np.sqrt(np.sum((value - self.sent[rank][name]) ** 2)))
                self.messages[rank][0] += degree
                if moved >= threshold or self.mixings < self.warmup:
                    self.messages[rank][1] += degree
                    self.sent[rank][name] = value.copy()
                    slopes = [slopes[1], moved / (self.mixings - last)]
                    threshold, last = self.reach * sum(slopes) / 2, self.mixings
                self.states[rank][name] = threshold, slopes, last
        self.mixings += 1
        return [
            {name: self.mixed(rank, name, value) for name, value in x.items()} for rank, x in enumerate(all_)
        ]

    def mixed(self, rank: int, name: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a tensor of a rank after it has moved towards what it has heard of."""
        moved = value
        for other in self.graph.neighbours(rank):
            new, mine = (self.states[r][name][2] == self.mixings - 1 for r in (other, rank))
            if new or self.stale == "mix" or (mine and self.stale == "pair"):
                own = self.sent[rank][name] if self.stale == "pair" else value
                moved = moved + self.graph.matrix[rank, other] * (self.sent[other][name] - own)
        return moved


def times(matrix: np.ndarray[Any, Any], all_: list[Weights]) -> list[Weights]:
    """Return tensors of all ranks times a matrix over ranks."""
    return [
        {name: sum(w * x[name] for w, x in zip(row, all_, strict=True)) for name in all_[0]} for row in matrix
    ]


def first_factors(rule: Any) -> Factors:
    """Return the factors of a rank's pairs before the first mixing, from a rule's state."""
    found: Factors = {}
    for other in rule.neighbours.weights:
        at, flat = 0, rule.state()[f"factor{other}"]
        for name, tensor in rule.tensors.items():
            rows = len(tensor) if tensor.ndim > 1 else 0
            if rule.rank < min(rows, tensor.size // max(1, rows)):
                factor = flat[at : at + rows * rule.rank].reshape(rows, rule.rank).copy()
                found[min(rule.neighbours.rank, other), max(rule.neighbours.rank, other), name] = factor
                at += max(rows, tensor.size // rows) * rule.rank
    return found
