"""Sum over the ranks that have parts of the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from hybridcomp.train.parallel.exchange import sum_exactly
from hybridcomp.train.topology import Topology


class WholeSums:
    """Sums over whole tensors, from those over this rank's parts: :data:`hybridcomp.train.optimizer.lans.Totals`.

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
