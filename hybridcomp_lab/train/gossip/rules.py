"""Define rules of gossip, and the one that all others are compared with: exact mixing with neighbours."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp_lab.train.gossip.neighbours import HEADER, Neighbours

Array = npt.NDArray[Any]
"""Array of float32 or float64."""

Tensors = Mapping[str, Array]


class Rule(abc.ABC):
    """Rule by which ranks mix their tensors with those of their neighbours, in place.

    All ranks call the same methods in the same order.

    Attributes:
        tensors: tensors of this rank, by name; C-contiguous, of one dtype.
        neighbours: neighbours of this rank.
        dtype: dtype of the tensors.
        size: number of elements of all tensors.
    """

    def __init__(self, tensors: Tensors, neighbours: Neighbours) -> None:
        """Take the tensors, which have the same names and shapes on all ranks.

        Raises:
            ValueError: there are none, or they have several dtypes, or another one, or a tensor is not C-contiguous.
        """
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1 or not dtypes <= {np.dtype(np.float32), np.dtype(np.float64)}:
            kinds = ", ".join(sorted(map(str, dtypes))) or "none"
            raise ValueError(f"tensors that gossip must be all float32, or all float64, not {kinds}")
        for name, tensor in tensors.items():
            if not tensor.flags.c_contiguous:
                raise ValueError(f"tensors that gossip must be C-contiguous, and {name} is not")
        self.tensors = tensors
        self.neighbours = neighbours
        self.dtype = dtypes.pop()
        self.size = sum(tensor.size for tensor in tensors.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return self.size * self.dtype.itemsize

    @abc.abstractmethod
    def mix(self, step: int) -> None:
        """Exchange messages with all neighbours, and mix.

        Args:
            step: step of training, the same on all ranks.

        Raises:
            CollectiveTimeoutError: a neighbour's message did not come in time; nothing is mixed.
            MismatchError: a neighbour is at another step.
            WireError: a message is damaged.
        """

    def state(self) -> dict[str, Array]:
        """Return the arrays that go from one mixing to the next, by name: the arrays themselves, to save and load."""
        return {}

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the parts of a flat array of :attr:`size` elements in the tensors' shapes, by name."""
        found, at = {}, 0
        for name, tensor in self.tensors.items():
            found[name] = flat[at : at + tensor.size].reshape(tensor.shape)
            at += tensor.size
        return found

    def add(self, flat: Array) -> None:
        """Add a flat array of :attr:`size` elements to the tensors."""
        for name, part in self.views(flat).items():
            tensor = self.tensors[name]
            tensor += part


class PlainGossip(Rule):
    """Exact mixing: x_i += sum over neighbours j of W_ij (x_j - x_i), all tensors uncompressed."""

    def __init__(self, tensors: Tensors, neighbours: Neighbours) -> None:
        """Take the tensors as :class:`Rule` describes."""
        super().__init__(tensors, neighbours)
        self._message = np.empty(HEADER + self.nbytes, np.uint8)

    def mix(self, step: int) -> None:
        """Mix as :meth:`Rule.mix` does."""
        neighbours = self.neighbours
        own = self._message[HEADER:].view(self.dtype)
        for name, part in self.views(own).items():
            part[...] = self.tensors[name]
        call = neighbours.begin("none", self.nbytes)
        messages = dict.fromkeys(neighbours.weights, self._message)
        theirs = neighbours.exchange(step, messages, self.nbytes, call)
        neighbours.end(call)
        self.add(differences(own, {other: m.view(self.dtype) for other, m in theirs.items()}, neighbours))


def differences(own: Array, theirs: Mapping[int, Array], neighbours: Neighbours) -> Array:
    """Return the sum over neighbours j of W_ij (x_j - x_i), for flat arrays, in the order of ranks."""
    total = np.zeros_like(own)
    for other, weight in neighbours.weights.items():
        part = theirs[other] - own
        part *= weight
        total += part
    return total
