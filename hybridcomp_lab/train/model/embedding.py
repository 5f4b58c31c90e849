"""Share a token embedding with the head, where a pipeline's first and last stage hold a copy each.

Both copies get the same gradient, that of the whole model, and so stay the same, bit for bit. It is summed

1.  over the D replicas of each stage, and then between the two stages: 2 (D - 1) / D and 1 times its size are sent by
    each rank; or
2.  where the policy says ``fused``, over the 2 D ranks at once: (2 D - 1) / D times its size (Song et al.,
    "Optimus-CC", arXiv:2301.09830).

Its messages are of an axis of their own, for policies and statistics.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

import hybridcomp.torch as hct
from hybridcomp.policy import Policy
from hybridcomp_lab.train.config import EMBEDDING, TrainConfig
from hybridcomp_lab.train.topology import Topology, make_groups

COPIES = ("embed.tokens.weight", "head.weight")
"""Names of the copies in the first and in the last stage."""


def is_shared(config: TrainConfig) -> bool:
    """Tell whether two stages hold a copy each."""
    return config.tie_embeddings and config.pp > 1


class SharedEmbedding:
    """Copy of the embedding on this rank, if it has one.

    Collective over all ranks, as its method.

    Args:
        parameters: parameters of the rank's stages, by name.
        config: configuration with the timeout of the groups.
        topology: mesh, of two or more ranks along pp.
        policy: policy of the job. If it is ``fused``, the sum is over replicas and stages at once.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, topology: Topology, policy: Policy
    ) -> None:
        names = [name for name in COPIES if name in parameters]
        self._copy = parameters[names[0]] if names else None
        self._replicas = topology.sizes["dp"]
        sums = _sums(topology, fused=policy.fused)
        self._groups = [make_groups(groups, EMBEDDING, config.timeout) for groups in sums]
        if policy.decides and any(len(groups) > 1 for groups in sums):  # all copies are to stay alike
            holders = sorted(rank for groups in sums[:1] for ranks in groups for rank in ranks)
            larger = make_groups([holders], EMBEDDING, config.timeout)
            for group in self._groups:
                if group is not None and larger is not None:
                    hct.decide_together(group, larger)

    def sum_gradient(self) -> None:
        """Turn the gradient of a step's last backward pass into that of the whole model, averaged over the replicas."""
        if self._copy is None or self._copy.grad is None:
            return
        with hct.in_phase("backward"):
            for group in self._groups:
                if group is not None:
                    dist.all_reduce(self._copy.grad, group=group)
        self._copy.grad /= self._replicas


def _sums(topology: Topology, *, fused: bool) -> list[list[list[int]]]:
    """Return the ranks of each group, for each of a step's sums, which follow one another."""
    sizes, rank_of = topology.sizes, topology.rank_of
    ends, replicas, parts = (0, sizes["pp"] - 1), range(sizes["dp"]), range(sizes["tp"])
    if fused:
        return [[[rank_of(pp, dp, tp) for pp in ends for dp in replicas] for tp in parts]]
    within = [[rank_of(pp, dp, tp) for dp in replicas] for pp in ends for tp in parts]
    between = [[rank_of(pp, dp, tp) for pp in ends] for dp in replicas for tp in parts]
    return [within, between] if len(replicas) > 1 else [between]
