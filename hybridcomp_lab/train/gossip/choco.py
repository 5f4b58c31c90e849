"""Gossip compressed differences to the values that neighbours know already: Choco."""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.codecs import Codec, decode_add
from hybridcomp.wire import HEADER_BYTES, peek
from hybridcomp_lab.train.gossip.neighbours import HEADER, Neighbours
from hybridcomp_lab.train.gossip.rules import Array, Rule, Tensors, differences


class Choco(Rule):
    """Choco-Gossip, which is Choco-SGD between steps of an optimizer.

    Koloskova, Stich, Jaggi: "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication" (arXiv 1902.00340), algorithms 1 and 2. Every rank i knows the estimates x^_i and those x^_j of its
    neighbours; all ranks that know an estimate have it alike, bit for bit. A mixing, with a codec C:

    1.  q_i = C(x_i - x^_i), tensor by tensor, goes to all neighbours.
    2.  x^_i += q_i, and x^_j += q_j.
    3.  x_i += gamma * sum over neighbours j of W_ij (x^_j - x^_i).

    Beside the tensors it needs memory of their size once, and once for each neighbour.

    Attributes:
        codec: codec C; any.
        gamma: factor gamma; a value that suits the codec has to be found, and too large a one diverges.
    """

    def __init__(
        self, tensors: Tensors, neighbours: Neighbours, codec: Codec, gamma: float, *, alike: bool
    ) -> None:
        """Begin with estimates that all ranks know.

        Args:
            tensors, neighbours: see :class:`~hybridcomp_lab.train.gossip.rules.Rule`.
            codec, gamma: see the attributes.
            alike: whether all ranks have the same tensors now, and these are the estimates; else they are zero.
        """
        super().__init__(tensors, neighbours)
        self.codec = codec
        self.gamma = gamma
        self._known = {rank: np.zeros(self.size, self.dtype) for rank in (self._me, *neighbours.weights)}
        self._estimates = {rank: self.views(flat) for rank, flat in self._known.items()}
        if alike:
            for views in self._estimates.values():
                for name, part in views.items():
                    part[...] = tensors[name]
        bounds = {name: codec.bound(tensor.size, self.dtype) for name, tensor in tensors.items()}
        self._bounds = bounds
        self._message = np.empty(HEADER + sum(bounds.values()), np.uint8)

    @property
    def _me(self) -> int:
        return self.neighbours.rank

    def mix(self, step: int) -> None:
        """Mix as :meth:`Rule.mix` does."""
        neighbours = self.neighbours
        call = neighbours.begin(self.codec.spec, self.nbytes)
        with call.encoding():
            end = self._encode(step)
        messages = dict.fromkeys(neighbours.weights, self._message[:end])
        received = neighbours.exchange(step, messages, self._message.size - HEADER, call)
        with call.decoding():
            for rank, message in {self._me: self._message[HEADER:], **received}.items():
                self._take(message, self._estimates[rank])
        neighbours.end(call)
        total = differences(self._known[self._me], self._known, neighbours)
        total *= self.gamma
        self.add(total)

    def _encode(self, step: int) -> int:
        """Write the messages of all tensors, one after another; return where they end."""
        codec, at = self.codec.at_step(step), HEADER
        for name, estimate in self._estimates[self._me].items():
            difference = self.tensors[name] - estimate
            at += len(codec.encode(difference, self._message[at : at + self._bounds[name]]))
        return at

    def _take(self, message: ByteArray, estimates: dict[str, Array]) -> None:
        """Add a rank's messages to its estimates."""
        at = 0
        for estimate in estimates.values():
            end = at + HEADER_BYTES + peek(message[at : at + HEADER_BYTES], message.size - at).payload
            decode_add(message[at:end], estimate.reshape(-1))
            at = end

    def state(self) -> dict[str, Array]:
        """Return the state, see :meth:`Rule.state`: the estimates of this rank and its neighbours."""
        return {f"estimate{rank}": flat for rank, flat in self._known.items()}
