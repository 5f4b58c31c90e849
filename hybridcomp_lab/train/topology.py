"""Place a rank in the mesh of pipeline, data and tensor parallelism."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hybridcomp.torch as hct
from hybridcomp.policy import Policy
from hybridcomp_lab.train.config import AXES, TrainConfig


@dataclass(frozen=True)
class Topology:
    """Mesh, and this rank's place in it. Ranks count tp fastest, then dp, then pp.

    Attributes:
        mesh: device mesh with the dimensions ``pp``, ``dp``, ``tp``.
        pp: index of this rank's pipeline stage.
        dp: index of this rank's replica.
        tp: index of its tensor-parallel part.
    """

    mesh: DeviceMesh
    pp: int
    dp: int
    tp: int

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Return the size of each axis."""
        return {axis: self.mesh.size(i) for i, axis in enumerate(AXES)}

    @property
    def rank(self) -> int:
        """Return this rank's number in the world."""
        return int(dist.get_rank())

    @property
    def is_first_stage(self) -> bool:
        """Tell whether tokens enter here."""
        return self.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Tell whether the loss is computed here."""
        return self.pp == self.sizes["pp"] - 1

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along ``axis`` only."""
        return self.mesh[axis].get_group()

    def rank_of(self, pp: int, dp: int, tp: int) -> int:
        """Return the world rank at a place of the mesh."""
        return (pp * self.sizes["dp"] + dp) * self.sizes["tp"] + tp


def make_topology(dp: int, pp: int, tp: int) -> Topology:
    """Make the mesh over all ranks; collective."""
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=AXES)
    places = {axis: mesh.get_local_rank(axis) for axis in AXES}
    return Topology(mesh, places["pp"], places["dp"], places["tp"])


def make_groups(ranks: Iterable[Sequence[int]], axis: str, timeout: float) -> dist.ProcessGroup | None:
    """Make process groups; collective over all ranks.

    Args:
        ranks: ranks of each group.
        axis: mesh axis that the groups span, for policies and statistics.
        timeout: seconds that an operation may take.

    Returns:
        The group that this rank is in, if any.
    """
    seconds, own = datetime.timedelta(seconds=timeout), None
    for members in ranks:
        group = dist.new_group(list(members), seconds, group_desc=axis)
        own = group if isinstance(group, dist.ProcessGroup) else own  # elsewhere it is a number
    return own


def decide_together(topology: Topology, config: TrainConfig, policy: Policy) -> None:
    """Have the groups of a replica's ranks decide together, if the policy decides; collective over all ranks.

    The ranks of tp hold copies of activations, and of the parameters that are not split. Each sends the former in its
    own pp group, and sums the gradients of the latter in its own dp group.
    """
    if config.tp == 1 or not (policy.decides or policy.adapts):
        return
    stages, replicas, parts = (range(topology.sizes[axis]) for axis in AXES)
    along = {
        "dp": [[topology.rank_of(pp, dp, tp) for dp in replicas for tp in parts] for pp in stages],
        "pp": [[topology.rank_of(pp, dp, tp) for pp in stages for tp in parts] for dp in replicas],
    }
    for axis in ("dp", "pp") if policy.decides else ("dp",):  # sends do not adapt
        if topology.sizes[axis] > 1:
            larger = make_groups(along[axis], f"mesh_{axis}_tp", config.timeout)
            assert larger is not None
            hct.decide_together(topology.group(axis), larger)
