"""Change the links' rate in the middle of a job, and see when the policy auto takes another choice.

python benchmarks/auto_change.py --json benchmarks/results/auto/change.json

Four hosts in the lab; a step is four all-reduces of named gradients, as a backward pass has them. After some steps all
links go to another rate. auto and each fixed choice have a job of their own. In every step all ranks compare
the bits of their results; a rank that differs ends the job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from resultfile import write

from hybridcomp.net import Lab

HOSTS = 4
SEED = 1
GRADIENTS = 4  # in a step
POLICIES = ("auto", "none", "int8:block=128", "int4:block=128")
_TIMEOUT = 400.0  # seconds that a job may take


def ranks(policy: str, steps: int, nbytes: int) -> None:
    """Run the steps as one rank; rank 0 prints a line of JSON for each."""
    from auto import fixed  # noqa: PLC0415  (initialises MPI)
    from mpi4py import MPI  # noqa: PLC0415

    import hybridcomp as hc  # noqa: PLC0415

    world = MPI.COMM_WORLD
    given = hc.load_policy("auto") if policy == "auto" else fixed("all_reduce", policy)
    comm = hc.Communicator(world, given, "dp", timeout=60.0)
    rng = np.random.default_rng((SEED, world.rank))
    gradients = [rng.standard_normal(nbytes // 4, np.float32) for _ in range(GRADIENTS)]
    sums = [np.empty_like(gradient) for gradient in gradients]
    for step in range(steps):
        world.Barrier()
        began = time.perf_counter()
        for number, (gradient, into) in enumerate(zip(gradients, sums, strict=True)):
            comm.Allreduce(gradient, into, name=f"gradient {number}")
        seconds = world.allreduce(time.perf_counter() - began, MPI.MAX)
        bits = [zlib.crc32(into) for into in sums]
        if len(set(world.allgather(tuple(bits)))) != 1:
            raise SystemExit(f"rank {world.rank}: bits differ in step {step}: {bits}")
        if world.rank == 0:
            choices = comm.decider.choices() if comm.decider else []
            line = {
                "seconds": seconds,
                "codec": choices[0].codec if choices else policy,
                "reason": choices[0].reason if choices else "fixed",
            }
            print(json.dumps(line), flush=True)


def job(lab: Lab, policy: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a policy's job, and change the rate in it; return its steps."""
    lab.change_rate(given.rate)
    words = [
        "python",
        __file__,
        "--as-rank",
        policy,
        "--steps",
        str(given.steps),
        "--bytes",
        str(given.bytes),
    ]
    began = time.monotonic()
    process = lab.popen(words, 1, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    try:
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            found.append(json.loads(line))
            if len(found) == given.change:
                lab.change_rate(given.to)
            if time.monotonic() - began > _TIMEOUT:
                raise SystemExit(f"{policy}: {len(found)} steps in {_TIMEOUT:g} s")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if len(found) != given.steps:
        raise SystemExit(f"{policy}: {len(found)} of {given.steps} steps; the job has failed")
    return found


def main() -> int:
    """Run all jobs, and write their steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the links at first")
    parser.add_argument("--to", default="100mbit", help="of the links then")
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--change", type=int, default=100, help="steps before the change")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a gradient")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--as-rank", metavar="POLICY", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        ranks(given.as_rank, given.steps, given.bytes)
        return 0
    jobs = {}
    with Lab(HOSTS, given.rate, kind="namespaces") as lab:
        for policy in POLICIES:
            jobs[policy] = job(lab, policy, given)
            halves = jobs[policy][given.change // 2 : given.change], jobs[policy][-given.change // 2 :]
            before, after = (statistics.median(step["seconds"] for step in half) for half in halves)
            print(f"{policy}: {before * 1e3:.2f} ms before, {after * 1e3:.2f} ms at the end", flush=True)
    codecs = [step["codec"] for step in jobs["auto"]]
    changes = [n for n in range(1, len(codecs)) if codecs[n] != codecs[n - 1]]
    noticed = next((n for n in range(given.change, len(codecs)) if "link" in jobs["auto"][n]["reason"]), None)
    print(f"auto: {codecs[given.change - 1]} at the change; changes at {changes}; at the end {codecs[-1]}")
    print(f"noticed {'never' if noticed is None else noticed - given.change} steps after the change")
    if given.json is not None:
        record = {
            "rate": given.rate,
            "to": given.to,
            "change": given.change,
            "bytes": given.bytes,
            "noticed": noticed,
            "jobs": jobs,
        }
        write(given.json, record, "namespaces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
