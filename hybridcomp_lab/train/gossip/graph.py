"""Define the graph of the ranks that gossip: neighbours, and the matrix by which they mix."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridcomp.errors import ConfigError

_EDGE = re.compile(r"(\d+)-(\d+)")
_ZERO = 1e-9  # eigenvalues below are zero but for rounding: those of 100,000 ranks in a ring are above


@dataclass(frozen=True)
class Graph:
    """Connected undirected graph over ranks.

    Attributes:
        ranks: number of ranks; they are 0, 1, ...
        edges: pairs of neighbours, the lower rank first, sorted.
    """

    ranks: int
    edges: tuple[tuple[int, int], ...]

    def neighbours(self, rank: int) -> list[int]:
        """Return the neighbours of a rank, in order."""
        return sorted(a + b - rank for a, b in self.edges if rank in (a, b))

    @functools.cached_property
    def matrix(self) -> npt.NDArray[np.float64]:
        """Return the mixing matrix W, float64 [ranks, ranks], by Metropolis's weights.

        Neighbours i and j have the weight 1 / (1 + the larger number of neighbours of the two): 1/3 in a ring of three
        and more. Each rank keeps the rest for itself. W is symmetric, and its rows add up to 1 (Xiao, Boyd: "Fast
        linear iterations for distributed averaging", 2004).
        """
        degree = [len(self.neighbours(rank)) for rank in range(self.ranks)]
        matrix = np.zeros((self.ranks, self.ranks))
        for a, b in self.edges:
            matrix[a, b] = matrix[b, a] = 1 / (1 + max(degree[a], degree[b]))
        np.fill_diagonal(matrix, 1 - matrix.sum(1))
        return matrix

    def weights(self, rank: int) -> dict[int, float]:
        """Return the weight of each neighbour of a rank, in order."""
        return {other: float(self.matrix[rank, other]) for other in self.neighbours(rank)}

    @functools.cached_property
    def rate(self) -> float:
        """Return the factor on differences by which ranks agree fastest; 1 for one rank.

        It is 2 / (l_min + l_max) of the eigenvalues of I - W that are not zero: 1.308 for a ring of 8.
        """
        values = np.linalg.eigvalsh(np.eye(self.ranks) - self.matrix)
        positive = values[values > _ZERO]
        return float(2 / (positive.min() + positive.max())) if positive.size else 1.0


def make_graph(text: str, ranks: int) -> Graph:
    """Make the graph that a text describes.

    Args:
        text: ``ring``, ``complete``, or edges such as ``0-1,1-2,2-3``, each once, in either direction.
        ranks: number of ranks.

    Raises:
        ConfigError: an edge is no pair of two of the ranks, or stands there twice, or the graph is not connected.
    """
    if text == "ring":
        edges = {(min(a, b), max(a, b)) for a in range(ranks) if (b := (a + 1) % ranks) != a}
    elif text == "complete":
        edges = {(a, b) for b in range(ranks) for a in range(b)}
    else:
        edges = _parsed(text, ranks)
    graph = Graph(ranks, tuple(sorted(edges)))
    reached = _reached(graph)
    if len(reached) < ranks:
        apart = min(set(range(ranks)) - reached)
        raise ConfigError(f"graph {text}: no edges lead from rank 0 to rank {apart}: it must be connected")
    return graph


def _parsed(text: str, ranks: int) -> set[tuple[int, int]]:
    edges: set[tuple[int, int]] = set()
    for part in text.split(","):
        found = _EDGE.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"graph {text}: must be ring, complete, or edges such as 0-1,1-2, not {part!r}")
        a, b = sorted(map(int, found.groups()))
        if a == b:
            raise ConfigError(f"graph {text}: {part} leads from a rank to itself")
        if b >= ranks:
            raise ConfigError(f"graph {text}: {part} names rank {b}, and they are 0 to {ranks - 1}")
        if (a, b) in edges:
            raise ConfigError(f"graph {text}: the edge {a}-{b} stands there twice; one goes both ways")
        edges.add((a, b))
    return edges


def _reached(graph: Graph) -> set[int]:
    """Return the ranks that can be reached from rank 0."""
    reached, left = {0}, [0]
    while left:
        for other in graph.neighbours(left.pop()):
            if other not in reached:
                reached.add(other)
                left.append(other)
    return reached
