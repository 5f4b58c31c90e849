"""``exponent`` and the preset ``exact``: collectives end with the bits that they have uncompressed."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.schedules.registry import ALGORITHMS
from tests.mpi.conftest import WORLD, communicator, gaussian, identical, verdict

P, ME = WORLD.size, WORLD.rank
N = 40_003


def sixteenths(n: int, rank: int = ME, dtype: str = "float32") -> np.ndarray:
    """Return values of which every sum of a few ranks is exact, in float16 too; no zero among them is negative."""
    return (np.round(gaussian(n, rank) * 16) / 16 + 0.0).astype(dtype)


def algorithms(comm: hc.Communicator) -> list[str]:
    codec = hc.get_codec("exponent")
    return [a.name for a in ALGORITHMS["all_reduce"].values() if refusal(a, comm._topology, codec) is None]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sums_are_those_of_lossless_by_every_algorithm(make, dtype):
    comm = make("exponent")
    for algorithm in algorithms(comm):
        for n in (5, 1000, N):
            results = {}
            for codec in ("exponent", "lossless"):
                results[codec] = np.empty(n, dtype)
                comm.Allreduce(gaussian(n, dtype=dtype), results[codec], codec=codec, algorithm=algorithm)
            verdict(identical(results["exponent"]), f"{algorithm}: different bits")
            verdict(results["exponent"].tobytes() == results["lossless"].tobytes(), f"{algorithm}, {n}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_shot_sums_in_the_order_of_ranks(make, dtype):
    comm = make("exponent")
    got = np.empty(N, dtype)
    comm.Allreduce(gaussian(N, dtype=dtype), got, algorithm="one_shot")
    want = functools.reduce(operator.add, [gaussian(N, r, dtype=dtype) for r in range(P)])
    verdict(got.tobytes() == want.tobytes())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_exact_sums_are_mpis(make, dtype):
    comm = make("exponent")
    want = np.sum([sixteenths(N, r, dtype) for r in range(P)], axis=0, dtype=dtype)
    if dtype != "float16":  # MPI has no such type
        WORLD.Allreduce(sixteenths(N, dtype=dtype), mpis := np.empty(N, dtype), MPI.SUM)
        verdict(mpis.tobytes() == want.tobytes())
    for algorithm in algorithms(comm):
        got = np.empty(N, dtype)
        comm.Allreduce(sixteenths(N, dtype=dtype), got, algorithm=algorithm)
        verdict(got.tobytes() == want.tobytes(), algorithm)


def test_the_preset_ends_with_the_bits_of_none():
    results = {}
    for policy in ("none", "exact"):
        comm = communicator(policy)
        x, parts = sixteenths(N), sixteenths(P * N)
        out = [np.empty(N, np.float32) for _ in range(4)] + [np.empty(P * N, np.float32) for _ in range(2)]
        comm.Allreduce(x, out[0])
        comm.Reduce_scatter_block(parts, out[1])
        out[2][:] = sixteenths(N, 0)
        comm.Bcast(out[2], 0)
        request = comm.Isend(x, (ME + 1) % P)
        comm.Recv(out[3], (ME - 1) % P)
        request.wait()
        comm.Allgather(x, out[4])
        comm.Alltoall(parts, out[5])
        results[policy] = [one.tobytes() for one in out]
        if policy == "exact" and P > 1:
            used = {row.op for row in comm.stats() if row.codec == "exponent"}
            verdict(used == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"}, f"{used}")
        comm.Free()
    verdict(results["none"] == results["exact"])


def test_bfloat16_of_the_preset():
    torch = pytest.importorskip("torch")
    results = {}
    for policy in ("none", "exact"):
        comm = communicator(policy)
        x = torch.from_numpy(sixteenths(N)).to(torch.bfloat16)
        comm.Allreduce(MPI.IN_PLACE, x)
        results[policy] = x.view(torch.uint8).numpy().tobytes()
        comm.Free()
    verdict(results["none"] == results["exact"])
