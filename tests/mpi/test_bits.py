"""Every codec by every algorithm: all ranks end with the same bits, and again with the same when it is repeated.

With HC_EXAMPLES set: every form of each codec, and every algorithm wherever it can be used, not only once.
"""

from __future__ import annotations

import functools
import os
import zlib

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.collectives.algorithms.selection import OPERATIONS, refusal
from hybridcomp.schedules.registry import ALGORITHMS
from tests.codecs.common import SPECS
from tests.mpi.conftest import WORLD, gaussian
from tests.mpi.hosts import Hosts

SIZES = [0, 3, 1001, 20_001]
LAYOUTS = {
    "one host": [0] * WORLD.size,
    "two hosts": [2 * r // WORLD.size for r in range(WORLD.size)],
    "turn about": [r % 2 for r in range(WORLD.size)],
}


THOROUGH = "HC_EXAMPLES" in os.environ
CODECS = SPECS if THOROUGH else list({spec.split(":")[0]: spec for spec in reversed(SPECS)}.values())
REPEATED = SIZES if THOROUGH else [1001]

values = functools.cache(gaussian)  # not to be written to


def run(comm: hc.Communicator, op: str, codec: str, n: int, algorithm: str | None) -> np.ndarray:
    """Return the result of an operation, gathered from all ranks if each has a part of it."""
    p = comm.size
    ours = {"codec": codec, "algorithm": algorithm}
    if op == "all_reduce":
        x = np.empty(n, np.float32).reshape((7, -1) if codec.startswith("powersgd") else -1)
        comm.Allreduce(values(n).reshape(x.shape), x, **ours)
        return x
    if op == "broadcast":
        x = values(n).copy()
        comm.Bcast(x, p - 1, **ours)
        return x
    whole = np.empty(n * p, np.float32)
    if op == "all_gather":
        comm.Allgather(values(n), whole, **ours)
        return whole
    if op == "reduce":
        x = np.empty(n, np.float32)
        comm.Reduce(values(n), x, root=p - 1, **ours)
        comm.mpi.Bcast(x, p - 1)
        return x
    assert op == "reduce_scatter"
    part = np.empty(n, np.float32)
    comm.Reduce_scatter_block(values(n * p), part, **ours)
    comm.mpi.Allgather(part, whole)
    return whole


def ways(comm: hc.Communicator, op: str, spec: str, done: set[tuple[str, str, str]]) -> list[str | None]:
    """Return the algorithms to use here; None is the only one that there is."""
    codec = hc.get_codec(spec)
    if codec.linear:
        return [None] if op == "all_reduce" else []
    names = [a.name for a in ALGORITHMS[op].values() if refusal(a, comm._topology, codec) is None]
    new = [name for name in names if THOROUGH or (op, spec, name) not in done]
    done.update((op, spec, name) for name in new)
    return [None] if spec == "none" and new else list(new)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_codec_by_every_algorithm(op):
    if WORLD.size == 1:
        return
    digests: dict[tuple[str, ...], set[int]] = {}
    done: set[tuple[str, str, str]] = set()
    for layout, hosts in LAYOUTS.items():
        comm = hc.Communicator(Hosts(WORLD, hosts), "none", timeout=30.0)
        for spec in CODECS:
            for name in ways(comm, op, spec, done):
                for n in [s for s in SIZES if s % 7 == 0 or not spec.startswith("powersgd")]:
                    results = [run(comm, op, spec, n, name) for _ in range(2 if n in REPEATED else 1)]
                    digests[layout, spec, str(name), str(n)] = {zlib.crc32(r.tobytes()) for r in results}
        comm.Free()
    ranks = WORLD.allgather(digests)
    assert all(set(r) == set(digests) for r in ranks), "the ranks did not run the same"
    different = [key for key in digests if len(set.union(*(r[key] for r in ranks))) != 1]
    assert not different
