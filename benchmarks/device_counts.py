"""Count what a DDP bucket of 27 MiB costs on the hook's devices, on the emulation: no GPU is needed.

mpiexec -n 4 python benchmarks/device_counts.py --json benchmarks/results/device_counts/4.json

For each codec and way of messages: launches of kernels, fills, copies by direction, points that the host waits for, and
calls of this package's functions; of the rank that has most. One rank alone has nothing to average.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HC_EMULATION_CHECKS", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' emulation

from mpi4py import MPI
from resultfile import write

from tests.mpi.device.counting import CODECS, COUNTED, WAYS, measure

WORLD = MPI.COMM_WORLD


def main() -> None:
    """Count, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=32, help="width of the narrower block that is averaged")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    comm, rows = WORLD.Dup(), []
    for way in WAYS if WORLD.size > 1 else ():
        for codec, form in CODECS:
            counts = measure(args.width, codec, form, way, comm)
            most = {what: WORLD.allreduce(counts.of[what], op=MPI.MAX) for what in COUNTED}
            rows.append(
                {"way": way, "codec": codec, "feedback": form, **most, "kernels": dict(counts.kernels)}
            )
            if WORLD.rank == 0:
                print(f"{way:18} {codec:16} {form or '':3}", most, flush=True)
    if args.json is not None and WORLD.rank == 0:
        write(args.json, {"ranks": WORLD.size, "width": args.width, "rows": rows})
    comm.Free()


if __name__ == "__main__":
    main()
