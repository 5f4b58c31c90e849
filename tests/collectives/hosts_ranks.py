"""Check collectives on ranks that ``HYBRIDCOMP_HOSTS`` lays out on hosts; 16 ranks, of which a layout takes the first.

Each layout is a list of ranks on each host, and the order in which a communicator has the ranks.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD
N = 8192  # elements of a part: all of them together are bulk for every layout
LAYOUTS = {
    "2x4": ([4, 4], 1),
    "4x2": ([2, 2, 2, 2], 1),
    "3x2": ([2, 2, 2], 1),
    "2x8": ([8, 8], 1),
    "unlike": ([3, 1, 2, 1], 1),
    "alone": ([4], 1),
    "in no order": ([4, 4], 5),  # 5 is prime to 8: neighbours are on one host or on two
}


def values(rank: int, n: int, dtype: str = "float32") -> np.ndarray:
    return (8 * np.random.default_rng([rank, n]).standard_normal(n)).astype(dtype)


def parts(counts: list[int]) -> list[slice]:
    return [slice(sum(counts[:q]), sum(counts[: q + 1])) for q in range(len(counts))]


class Checked:
    """A communicator on hosts, and what its ranks found wrong."""

    def __init__(self, name: str, hosts: list[int], comm: hc.Communicator) -> None:
        self.name, self.hosts, self.comm = name, hosts, comm
        self.wrong: list[str] = []
        self.h, self.p, self.rank = len(set(hosts)), comm.size, comm.rank

    def say(self, good: bool, what: str) -> None:
        if not good:
            self.wrong.append(f"{self.name}, rank {self.rank}: {what}")

    def alike(self, array: np.ndarray, what: str) -> None:
        """Every rank has the same bits."""
        other = array.copy()
        self.comm.Bcast(other.view(np.uint8), 0, codec="none")
        self.say(other.tobytes() == array.tobytes(), f"{what}: its bits are not rank 0's")

    def near(self, got: np.ndarray, want: np.ndarray, most: float, what: str) -> None:
        error = np.linalg.norm(got.astype(np.float64) - want) / max(1.0, np.linalg.norm(want))
        self.say(error <= most, f"{what}: error {error:.2g}")

    def crossed(self, nbytes: float, what: str, before: int, exact: bool) -> None:
        """As many bytes left hosts in an operation as the best algorithm sends, on all ranks together."""
        all_ = np.array([self.between() - before], np.int64)
        self.comm.Allreduce(MPI.IN_PLACE, all_, codec="none")
        least = (self.h - 1) * nbytes
        self.say(all_[0] == least if exact else least <= all_[0] <= 1.02 * least + 64 * self.h * self.p,
                 f"{what}: {all_[0]} bytes left a host, {least} would do")  # fmt: skip

    def between(self) -> int:
        return sum(row.between_bytes for row in self.comm.stats())


def check(c: Checked) -> None:
    """Run gathers and sums, uncompressed and not, and count what leaves hosts."""
    comm, p, rank = c.comm, c.p, c.rank
    unlike = [N * (1 + q % 3) for q in range(p)]
    for codec, most, ratio in ("none", 0.0, 1.0), ("int8:block=128", 0.02, 0.2578):
        exact = codec == "none"
        every = np.empty(N * p, np.float32)
        before = c.between()
        comm.Allgather(values(rank, N), every, codec=codec)
        c.crossed(ratio * every.nbytes, f"all_gather by {codec}", before, exact)
        c.alike(every, f"all_gather by {codec}")
        c.near(every, np.concatenate([values(q, N) for q in range(p)]), most, f"all_gather by {codec}")

        every[rank * N : (rank + 1) * N] = values(rank, N)
        before = c.between()
        comm.Iallgather(MPI.IN_PLACE, every, codec=codec).wait()
        c.crossed(ratio * every.nbytes, f"all_gather in place by {codec}", before, exact)
        c.near(every, np.concatenate([values(q, N) for q in range(p)]), most, f"in place by {codec}")

        several = np.full(sum(unlike) + p, -1, np.float32)  # one element between parts
        starts = [cut.start + q for q, cut in enumerate(parts(unlike))]
        before = c.between()
        comm.Allgatherv(values(rank, unlike[rank]), [several, (unlike, starts)], codec=codec)
        c.crossed(ratio * 4 * sum(unlike), f"all_gather of unlike parts by {codec}", before, exact)
        c.alike(several, f"all_gather of unlike parts by {codec}")
        for q, start in enumerate(starts):
            got = several[start : start + unlike[q]]
            c.near(got, values(q, unlike[q]), most, f"part {q} by {codec}")
            c.say(several[start + unlike[q]] == -1, f"what follows part {q} is overwritten, by {codec}")

        total = sum(values(q, N * p).astype(np.float64) for q in range(p))
        own = np.empty(N, np.float32)
        before = c.between()
        comm.Reduce_scatter_block(values(rank, N * p), own, codec=codec)
        c.crossed(ratio * 4 * N * p, f"reduce_scatter by {codec}", before, exact)
        c.near(own, total[rank * N : (rank + 1) * N], most or 1e-6, f"reduce_scatter by {codec}")

        total = sum(values(q, sum(unlike)).astype(np.float64) for q in range(p))
        own = np.empty(unlike[rank], np.float32)
        before = c.between()
        comm.Reduce_scatter(values(rank, sum(unlike)), own, unlike, "avg", codec=codec)
        c.crossed(ratio * 4 * sum(unlike), f"reduce_scatter of unlike parts by {codec}", before, exact)
        c.near(
            own, total[parts(unlike)[rank]] / p, most or 1e-6, f"reduce_scatter of unlike parts by {codec}"
        )

        summed = values(rank, N * p)
        before = c.between()
        comm.Allreduce(MPI.IN_PLACE, summed, codec=codec)
        c.crossed(ratio * 8 * N * p, f"all_reduce by {codec}", before, exact)
        c.alike(summed, f"all_reduce by {codec}")
    for dtype in "bool", "int64", "complex128", "float16", "uint8":
        n = 4 * N
        every = np.empty(n * p, dtype)
        before = c.between()
        comm.Allgather(values(rank, n).astype(dtype), every)
        want = np.concatenate([values(q, n).astype(dtype) for q in range(p)])
        c.crossed(every.nbytes, f"all_gather of {dtype}", before, exact=True)
        c.say(np.array_equal(every, want), f"all_gather of {dtype}")
    # Ranks whose buffers differ in form, as mpi4py takes them, have one way.
    given: list[object] = [values(rank, N), [values(rank, N), N, MPI.FLOAT], memoryview(values(rank, N))]
    every = np.empty(N * p, np.float32)
    comm.Allgather(given[rank % 3], every)
    c.near(
        every, np.concatenate([values(q, N) for q in range(p)]), 0.0, "all_gather of buffers of several forms"
    )


def main() -> int:
    wrong: list[str] = []
    world = hc.Communicator(
        WORLD, "none", "world", timeout=240
    )  # whose barrier leaves the cores to those at work
    for name in sys.argv[1:]:
        sizes, stride = LAYOUTS[name]
        p, rest = sum(sizes), WORLD.size - sum(sizes)
        os.environ["HYBRIDCOMP_HOSTS"] = ",".join(map(str, [*sizes, *[rest][: rest > 0]]))
        places = {stride * i % p: i for i in range(p)}
        takes_part = WORLD.rank < p
        part = WORLD.Split(int(takes_part), places.get(WORLD.rank, 0))
        if takes_part:
            order = sorted(places, key=places.__getitem__)
            hosts = [host for host, n in enumerate(sizes) for _ in range(n)]
            comm = hc.Communicator(part, "none", "dp", timeout=60)
            checked = Checked(name, [hosts[rank] for rank in order], comm)
            checked.say(comm.hosts == checked.h, f"it is on {comm.hosts} hosts")
            check(checked)
            comm.Free()
            wrong += checked.wrong
        world.Barrier()
        part.Free()
    world.Free()
    found = [line for lines in WORLD.allgather(wrong) for line in lines]
    if WORLD.rank == 0:
        print("\n".join(found) or "well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
