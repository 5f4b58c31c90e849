"""Calls as programs of mpi4py write them, beside mpi4py's own: ``mpiexec -n 2 python benchmarks/calls.py``.

Nothing is compressed (policy ``none``), so that all the difference is what a call costs. Ours and mpi4py's alternate.
Tables:

*   ``calls``: processor time of one call on 8 bytes among one rank alone, where no rank waits, with the buffer as an
    array and as ``[array, MPI.FLOAT]``;
*   ``latency``: half a round trip between two ranks, ``[mmap, count, MPI.BYTE]`` as in mpi4py's ``osu_latency.py``;
*   ``bandwidth``: MB/s of windows of 64 non-blocking messages, as in its ``osu_bw.py``.

``--lab`` measures instead what a window of 64 non-blocking messages of 1 MiB of float32 takes of a slow link, by codec,
beside mpi4py: ``hybridcomp lab -n 2 --rate 1gbit -- python benchmarks/calls.py --lab``. ``windows``: seconds of a
window, processor time of the busier rank, the bytes that cross the link, and their share of what it carries meanwhile.

Every result is checked.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from collbench.link import Link, between
from mpi4py import MPI
from resultfile import commits, read, write

import hybridcomp as hc
from hybridcomp.net import Rate
from hybridcomp.results.provenance import provenance

WORLD = MPI.COMM_WORLD
PARTS = ("about", "about_lab", "calls", "latency", "bandwidth", "windows")  # of the file, from two runs
ROUNDS, ROUNDS_OF_MESSAGES = 7, 200
WINDOW = 64
LATENCIES = [8, 1 << 10, 1 << 16]
BANDWIDTHS = [8, 1 << 10, 1 << 16, 1 << 20]
LAB_ROUNDS = 15
POLICIES = ("none", "int8", "bounded:abs=1e-3")
Call = Callable[[Any, Any, Any], None]


def _isend_irecv(c: Any, s: Any, o: Any) -> None:
    received = c.Irecv(o, 0, 1)
    sent = c.Isend(s, 0, 1)
    sent.Wait()
    received.Wait()


def _v(spec: Any) -> list[Any]:
    return [spec[0] if isinstance(spec, list) else spec, [2], [0], MPI.FLOAT]


CALLS: dict[str, Call] = {
    "Isend, Irecv, 2 Wait": _isend_irecv,
    "Sendrecv": lambda c, s, o: c.Sendrecv(s, 0, 1, o, 0, 1),
    "Allreduce": lambda c, s, o: c.Allreduce(s, o),
    "Iallreduce, Wait": lambda c, s, o: c.Iallreduce(s, o).Wait(),
    "Allgather": lambda c, s, o: c.Allgather(s, o),
    "Alltoall": lambda c, s, o: c.Alltoall(s, o),
    "Gather": lambda c, s, o: c.Gather(s, o, 0),
    "Scatter": lambda c, s, o: c.Scatter(s, o, 0),
    "Reduce": lambda c, s, o: c.Reduce(s, o, MPI.SUM, 0),
    "Scan": lambda c, s, o: c.Scan(s, o),
    "Allgatherv": lambda c, s, o: c.Allgatherv(s, _v(o)),
    "Alltoallv": lambda c, s, o: c.Alltoallv(_v(s), _v(o)),
}


def processor_microseconds(call: Call, comms: list[Any], send: Any, recv: Any, n: int = 300) -> list[float]:
    """Return the least processor time of a call on each communicator over rounds in turn."""
    best = [float("inf")] * len(comms)
    for _ in range(ROUNDS):
        for i, comm in enumerate(comms):
            began = time.process_time()
            for _ in range(n):
                call(comm, send, recv)
            best[i] = min(best[i], (time.process_time() - began) / n * 1e6)
    return best


def calls() -> list[dict[str, Any]]:
    """Measure the calls of one rank alone."""
    comms = [MPI.COMM_SELF, hc.Communicator(MPI.COMM_SELF, policy="none")]
    rows = []
    for name, call in CALLS.items():
        for spelling in ("array", "list"):
            send, recv = np.array([1, 2], np.float32), np.zeros(2, np.float32)
            given = (send, recv) if spelling == "array" else ([send, MPI.FLOAT], [recv, MPI.FLOAT])
            for comm in comms:
                recv[:] = 0
                call(comm, *given)
                if recv.tolist() != [1, 2]:
                    sys.exit(f"{name} of {type(comm).__name__} gave {recv}")
            bare, ours = processor_microseconds(call, comms, *given)
            rows.append({"call": name, "buffer": spelling, "mpi4py_us": round(bare, 2), "us": round(ours, 2)})
    comms[1].Free()
    return rows


def alternate(comms: list[Any], run: Callable[[Any], None], n: int) -> list[float]:
    """Return the least seconds of a function on each communicator, in turn, of the slower rank: others disturb more."""
    seconds = np.zeros((n, len(comms)))
    for i in range(n):
        for j, comm in enumerate(comms):
            WORLD.Barrier()
            began = time.perf_counter()
            run(comm)
            seconds[i, j] = time.perf_counter() - began
    slower = np.zeros_like(seconds)
    WORLD.Allreduce(seconds, slower, MPI.MAX)
    return [float(least) for least in slower.min(0)]


def latency(comms: list[Any], nbytes: int) -> dict[str, Any]:
    """Measure half a round trip."""
    me, peer = WORLD.rank, 1 - WORLD.rank
    sent, got = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
    sent[:] = bytes([me + 1]) * nbytes
    out, into = [sent, nbytes, MPI.BYTE], [got, nbytes, MPI.BYTE]
    many = 20

    def run(comm: Any) -> None:
        for _ in range(many):
            if me == 0:
                comm.Send(out, peer, 1)
                comm.Recv(into, peer, 1)
            else:
                comm.Recv(into, peer, 1)
                comm.Send(out, peer, 1)

    bare, ours = (s / many / 2 * 1e6 for s in alternate(comms, run, ROUNDS_OF_MESSAGES))
    if got[:] != bytes([peer + 1]) * nbytes:
        sys.exit("a message has arrived wrong")
    return {"bytes": nbytes, "mpi4py_us": round(bare, 2), "us": round(ours, 2), "over": round(ours / bare, 2)}


def bandwidth(comms: list[Any], nbytes: int) -> dict[str, Any]:
    """Measure windows of messages from rank 0 to rank 1."""
    me = WORLD.rank
    data, answer = mmap.mmap(-1, nbytes), np.zeros(1, np.uint8)
    data[:] = bytes([0 if me else 7]) * nbytes
    spec = [data, nbytes, MPI.BYTE]

    def run(comm: Any) -> None:
        if me == 0:
            MPI.Request.Waitall([comm.Isend(spec, 1, 2) for _ in range(WINDOW)])
            comm.Recv([answer, MPI.BYTE], 1, 3)
        else:
            MPI.Request.Waitall([comm.Irecv(spec, 0, 2) for _ in range(WINDOW)])
            comm.Send([answer, MPI.BYTE], 0, 3)

    bare, ours = (
        WINDOW * nbytes / s / 1e6
        for s in alternate(comms, run, ROUNDS_OF_MESSAGES if nbytes < 1 << 20 else 30)
    )
    if data[:] != bytes([7]) * nbytes:
        sys.exit("a message has arrived wrong")
    return {
        "bytes": nbytes,
        "mpi4py_mb_s": round(bare, 2),
        "mb_s": round(ours, 2),
        "of": round(ours / bare, 2),
    }


def windows() -> list[dict[str, Any]]:
    """Measure windows of 64 messages of 1 MiB of float32 from rank 0 to rank 1, over the lab's link."""
    link, me, n = Link(), WORLD.rank, (1 << 20) // 4
    bits = Rate.parse(link.rate).bits_per_second
    if bits is None:
        sys.exit("a window needs the shaped link of a lab: hybridcomp lab -n 2 --rate 1gbit -- ...")
    sent = np.random.default_rng(0).standard_normal((WINDOW, n), np.float32)
    answer, rows = np.zeros(1, np.uint8), []
    for policy in ("mpi4py", *POLICIES):
        comm: Any = WORLD if policy == "mpi4py" else hc.Communicator(WORLD, policy=policy)
        seconds, processor, crossed = [], [], 0
        for _ in range(LAB_ROUNDS + 1):
            got = np.zeros((WINDOW, n), np.float32)
            WORLD.Barrier()
            before, spent, began = link.now(), time.process_time(), time.perf_counter()
            if me == 0:
                MPI.Request.Waitall([comm.Isend(one, 1, 2) for one in sent])
                comm.Recv([answer, MPI.BYTE], 1, 3)
            else:
                MPI.Request.Waitall([comm.Irecv(one, 0, 2) for one in got])
                comm.Send([answer, MPI.BYTE], 0, 3)
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - spent)
            crossed = between(before, link.now())
            if me == 1 and np.abs(got - sent).max() > (0 if policy in ("mpi4py", "none") else 0.1):
                sys.exit(f"{policy}: a message has arrived wrong")
        slower = np.zeros(len(seconds))
        WORLD.Allreduce(np.array(seconds), slower, MPI.MAX)
        crossed = WORLD.allreduce(crossed, MPI.MAX)
        took, least = float(np.median(slower[1:])), float(slower[1:].min())
        busy = WORLD.allreduce(float(np.median(processor[1:])), MPI.MAX)
        rows.append(
            {
                "policy": policy,
                "seconds": round(took, 3),
                "wire_mb": round(crossed / 1e6, 2),
                "processor_seconds": round(busy, 3),
                "of_link": round(crossed * 8 / bits / took, 3),
                "least_seconds": round(least, 3),
                "most_of_link": round(crossed * 8 / bits / least, 3),
            }
        )
        if policy != "mpi4py":
            comm.Free()
    return rows


def about() -> dict[str, Any]:
    """Describe the run: where its figures come from, and MPI."""
    return provenance() | {"mpi": MPI.Get_library_version().splitlines()[0].strip()}


def main() -> None:
    """Print the tables on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lab", action="store_true", help="measure windows over a lab's link")
    args = parser.parse_args()
    if WORLD.size != 2:
        sys.exit("a message needs two ranks: mpiexec -n 2 python benchmarks/calls.py")
    if args.lab:
        told({"windows": windows()}, args.json)
        return
    WORLD.Barrier()
    alone = calls() if WORLD.rank == 0 else []
    WORLD.Barrier()
    comms = [WORLD, hc.Communicator(WORLD, policy="none")]
    tables = {
        "calls": alone,
        "latency": [latency(comms, nbytes) for nbytes in LATENCIES],
        "bandwidth": [bandwidth(comms, nbytes) for nbytes in BANDWIDTHS],
    }
    comms[1].Free()
    told(tables, args.json)


def told(tables: dict[str, list[dict[str, Any]]], path: Path | None) -> None:
    """Print tables on rank 0, and add them to a file."""
    if WORLD.rank:
        return
    for name, rows in tables.items():
        print(f"{name}:")
        for row in rows:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
    if path is not None:
        kept = read(path) if path.exists() else {}
        found = {name: kept[name] for name in PARTS if name in kept}
        found |= {"about_lab" if "windows" in tables else "about": about(), **tables}
        runs = [found[name] for name in PARTS[:2] if name in found]
        write(path, {"commit": commits(runs), **found})


if __name__ == "__main__":
    main()
