"""All-reduces of ever larger arrays, which are kept: ``python -m tests.faults.resources.growing CODEC FOLDER``."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

_STEP = 1 << 20  # elements
_MOST = 4096  # operations: some TiB


def main(codec: str, folder: str) -> None:
    """Write a line for each operation that has ended well."""
    comm = hc.Communicator(MPI.COMM_WORLD, codec, "dp", timeout=10.0)
    kept = []
    with Path(folder, str(comm.rank)).open("w") as log:
        for i in range(1, _MOST):
            x = np.random.default_rng([i, comm.rank]).standard_normal(i * _STEP, dtype=np.float32)
            comm.Allreduce(MPI.IN_PLACE, x)
            kept.append(x)
            log.write(json.dumps({"bits": hashlib.sha256(x).hexdigest()[:16]}) + "\n")
            log.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
