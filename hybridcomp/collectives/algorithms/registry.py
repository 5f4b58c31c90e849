"""The table of the algorithms of each operation, with their capabilities.

Another one is a generator in a file of its own and an entry here. All of one operation have the same signature:

*   ``all_reduce``, ``reduce_scatter``: ``run(carrier, send, recv, tags, *, mean, memory)``
*   ``all_gather``: ``run(carrier, send, recv, tags)``
*   ``broadcast``: ``run(carrier, buf, root, tags)``
*   ``reduce``: ``run(carrier, send, recv, root, tags, *, mean)``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridcomp.codecs import Codec
from hybridcomp.codecs.sparse.base import SparseCodec
from hybridcomp.collectives.algorithms import hierarchical
from hybridcomp.collectives.algorithms.allgather import allgather
from hybridcomp.collectives.algorithms.allreduce import allreduce
from hybridcomp.collectives.algorithms.bcast import bcast, direct_bcast, scatter_bcast
from hybridcomp.collectives.algorithms.halving import (
    doubling_allgather,
    halving_allreduce,
    halving_reduce_scatter,
)
from hybridcomp.collectives.algorithms.hierarchical import hierarchical_allreduce
from hybridcomp.collectives.algorithms.hierarchical_parts import (
    hierarchical_allgather,
    hierarchical_reduce_scatter,
)
from hybridcomp.collectives.algorithms.oktopk import oktopk_allreduce
from hybridcomp.collectives.algorithms.reduce import direct_reduce, tree_reduce
from hybridcomp.collectives.algorithms.reduce_scatter import reduce_scatter_block
from hybridcomp.collectives.algorithms.ring import ring_allgather, ring_allreduce, ring_reduce_scatter
from hybridcomp.collectives.algorithms.sparse import sparse_allreduce
from hybridcomp.collectives.execution.progress import Steps
from hybridcomp.schedules.registry import ALGORITHMS as SCHEDULES
from hybridcomp.schedules.topology import Topology


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of an operation.

    Attributes:
        name: as callers and the cost model say it.
        run: the generator; None where only the compiled engine can run it.
        tags: how many it takes.
        feedback: whether it takes a memory of error feedback.
        estimates: whether that may be of ``ef21``, whose messages are differences from what receivers hold.
        device: whether it works on a device's memory; else on a copy in the host's.
        reencodes: whether it encodes sums of sums, so that a lossy codec loses more; then it must be asked for.
        refuses: why it cannot be used by these ranks with this codec; None if it can.
    """

    name: str
    run: Callable[..., Steps] | None
    tags: int = 1
    feedback: bool = False
    estimates: bool = True
    device: bool = True
    reencodes: bool = False
    refuses: Callable[[Topology, Codec], str | None] = lambda topology, codec: None

    def scheduled(self, op: str) -> bool:
        """Tell whether it has a schedule of an operation, which the compiled engine runs."""
        return self.name in SCHEDULES[op]


def _only_sparse(topology: Topology, codec: Codec) -> str | None:
    return None if isinstance(codec, SparseCodec) else f"{codec.name} is not a sparse codec"


#: By operation, the default first.
ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (
        Algorithm("direct", allreduce, tags=2, feedback=True),
        Algorithm("one_shot", None, feedback=True, estimates=False),
        Algorithm(
            "hierarchical", hierarchical_allreduce, tags=4, feedback=True, refuses=hierarchical.refuses
        ),
        Algorithm("ring", ring_allreduce, tags=2, feedback=True),
        Algorithm("halving", halving_allreduce, tags=2, reencodes=True),
        Algorithm("sparse", sparse_allreduce, feedback=True, estimates=False, refuses=_only_sparse),
        Algorithm(
            "oktopk",
            oktopk_allreduce,
            tags=3,
            feedback=True,
            estimates=False,
            device=False,
            refuses=_only_sparse,
        ),
    ),
    "reduce_scatter": (
        Algorithm("direct", reduce_scatter_block, feedback=True),
        Algorithm(
            "hierarchical", hierarchical_reduce_scatter, tags=2, feedback=True, refuses=hierarchical.refuses
        ),
        Algorithm("ring", ring_reduce_scatter, feedback=True),
        Algorithm("halving", halving_reduce_scatter, reencodes=True),
    ),
    "all_gather": (
        Algorithm("direct", allgather),
        Algorithm("hierarchical", hierarchical_allgather, tags=2, refuses=hierarchical.refuses),
        Algorithm("ring", ring_allgather),
        Algorithm("doubling", doubling_allgather),
    ),
    "broadcast": (
        Algorithm("tree", bcast),
        Algorithm("direct", direct_bcast),
        Algorithm("scatter", scatter_bcast),
    ),
    "reduce": (Algorithm("direct", direct_reduce), Algorithm("tree", tree_reduce, reencodes=True)),
}
