"""Learn the differences of neighbours' matrices by power iterations, of which only factors travel: PowerGossip."""

from __future__ import annotations

import numpy as np

from hybridcomp.codecs.linear.powersgd import matrix_shape
from hybridcomp.codecs.linear.powersgd_start import initial_q
from hybridcomp_lab.train.gossip.neighbours import HEADER, Neighbours
from hybridcomp_lab.train.gossip.rules import Array, Rule, Tensors

_WEAK = 1e-6  # relative to a factor's strongest column: a weaker one is rounding


class PowerGossip(Rule):
    """Low-rank gossip of pairs of neighbours, without a step size to tune: PowerGossip.

    Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" bring
    it from gradients to parameters in "Practical Low-Rank Communication Compression in Decentralized Deep Learning"
    (arXiv 2008.01425). Neighbours i < j keep, for each matrix X, an orthonormal p, alike on both. A mixing:

    1.  Each computes its q = X^T p, and sends it to the other.
    2.  d = q_j - q_i; X_i += g W_ij p d^T, and X_j -= g W_ij p d^T.
    3.  p becomes d with its columns made orthonormal, for the other side of X in the next mixing.

    That is a power iteration on X_j - X_i which starts where the one before ended. The factor g is the one by which
    exact gossip converges fastest, :attr:`~hybridcomp_lab.train.gossip.graph.Graph.rate`. Tensors of fewer than two
    dimensions, and matrices that a factor of this rank would not make smaller, are exchanged whole, by the same factor.
    There is no error feedback: differences that a mixing leaves out are there in the next one.

    Attributes:
        rank: columns of p.
    """

    def __init__(self, tensors: Tensors, neighbours: Neighbours, rank: int) -> None:
        """Begin with random factors, alike on the two ranks of each pair.

        Args:
            tensors, neighbours: see :class:`~hybridcomp_lab.train.gossip.rules.Rule`.
            rank: see the attributes; above 0.
        """
        super().__init__(tensors, neighbours)
        self.rank = rank
        self._matrices = {
            name: t.reshape(matrix_shape(t.shape))
            for name, t in tensors.items()
            if t.ndim > 1 and self._pays(t)
        }
        self._whole = {name: tensor for name, tensor in tensors.items() if name not in self._matrices}
        self._round = np.zeros(1, np.int64)
        room = sum(max(m.shape) * rank for m in self._matrices.values())
        self._factors = {other: np.zeros(room, self.dtype) for other in neighbours.weights}
        for other in self._factors:
            for number, (name, factor) in enumerate(self._bases(other).items()):
                factor[...] = self._orthonormal(
                    self._drawn(other, number, self._matrices[name].shape[0]), other, number
                )

    def _pays(self, tensor: Array) -> bool:
        return bool(self.rank < min(matrix_shape(tensor.shape)))

    def _bases(self, other: int, after: int = 0) -> dict[str, Array]:
        """Return a pair's p of each matrix, [rows or columns, rank]: for the next mixing, or ``after`` so many."""
        found, at = {}, 0
        side = (int(self._round[0]) + after) % 2
        for name, matrix in self._matrices.items():
            length = matrix.shape[side] * self.rank
            found[name] = self._factors[other][at : at + length].reshape(-1, self.rank)
            at += max(matrix.shape) * self.rank
        return found

    def _facing(self, name: str) -> Array:
        """Return a matrix with the side of p first."""
        return self._matrices[name].T if self._round[0] % 2 else self._matrices[name]

    def mix(self, step: int) -> None:
        """Mix as :meth:`Rule.mix` does."""
        neighbours = self.neighbours
        call = neighbours.begin(f"powergossip:rank={self.rank}", self.nbytes)
        with call.encoding():
            own = {other: self._message(other) for other in neighbours.weights}
        room = next(iter(own.values())).size - HEADER if own else 0
        received = neighbours.exchange(step, own, room, call)
        with call.decoding():
            for other, message in received.items():
                pair = own[other][HEADER:].view(self.dtype), message.view(self.dtype)
                self._apply(other, *(pair if neighbours.rank < other else reversed(pair)))
        self._round += 1
        neighbours.end(call)

    def _message(self, other: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return this rank's message of all tensors for a neighbour: q, or the whole tensor."""
        parts = [np.zeros(HEADER // self.dtype.itemsize, self.dtype)]
        parts += [(self._facing(name).T @ p).reshape(-1) for name, p in self._bases(other).items()]
        parts += [tensor.reshape(-1) for tensor in self._whole.values()]
        return np.concatenate(parts).view(np.uint8)

    def _apply(self, other: int, lower: Array, higher: Array) -> None:
        """Move towards a neighbour, and take the factors of the next mixing.

        Args:
            other: the neighbour.
            lower, higher: messages of the pair's lower rank and of its higher one. Both ranks take the same
                difference, to the signs of its zeros, or they would not find the same factors.
        """
        difference = higher - lower
        step = self.neighbours.graph.rate * self.neighbours.weights[other]
        step = step if self.neighbours.rank < other else -step
        at = 0
        following = self._bases(other, 1)
        for number, (name, p) in enumerate(self._bases(other).items()):
            facing = self._facing(name)
            d = difference[at : at + facing.shape[1] * self.rank].reshape(-1, self.rank)
            at += d.size
            facing += step * (p @ d.T)
            following[name][...] = self._orthonormal(d, other, number)
        for tensor in self._whole.values():
            tensor[...] += step * difference[at : at + tensor.size].reshape(tensor.shape)
            at += tensor.size

    def _orthonormal(self, columns: Array, other: int, number: int) -> Array:
        """Return orthonormal columns that span the given ones, with random ones in the place of negligible columns.

        Without them an iteration could not find again what has once been equal, as all is when training begins.
        """
        exact = columns.astype(np.float64)
        q, r = np.linalg.qr(exact)
        strength = np.abs(np.diag(r))
        strong = strength > max(_WEAK * strength.max(initial=0.0), np.finfo(np.float64).tiny)  # false for NaN
        if not strong.all():
            drawn = self._drawn(other, number, len(columns))
            q, _ = np.linalg.qr(np.where(strong, q, drawn))
        return q

    def _drawn(self, other: int, number: int, length: int) -> Array:
        """Draw random columns, alike on both ranks of a pair, and others in each mixing."""
        pair = min(self.neighbours.rank, other) * self.neighbours.graph.ranks + max(
            self.neighbours.rank, other
        )
        seed = (pair * len(self._matrices) + number << 32) + int(self._round[0])
        return initial_q(length, self.rank, seed).astype(np.float64)

    def state(self) -> dict[str, Array]:
        """Return the state, see :meth:`Rule.state`: the factors of this rank's pairs, and the number of mixings."""
        return {"round": self._round} | {f"factor{other}": flat for other, flat in self._factors.items()}
