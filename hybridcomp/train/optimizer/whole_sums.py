"""Sum over the ranks that have parts of the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from hybridcomp.train.parallel.exchange import sum_exactly
from hybridcomp.train.topology import Topology


class WholeSums:
    """Makes sums over whole tensors of those over this rank's parts: :data:`hybridcomp.train.optimizer.lans.Totals`.

    Args:
        parameters: this rank's, by name.
        names: of all tensors that its replica's ranks, or the replicas, have parts of; alike on them.
        over: by axis of the mesh, the names of those that are split over it; ``tp`` and ``dp``.
        topology: the mesh.
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
        """Return the sums of whole tensors, fp64 [sums, parameters], of those of these parameters; collective."""
        mine = [self._places[parameter] for parameter in parameters]
        everyone = sums.new_zeros(len(sums), self._count)
        everyone[:, mine] = sums
        for group, places in self._over:
            everyone[:, places] = sum_exactly(everyone[:, places], group)
        return everyone[:, mine]
