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
from tests.mpi.conftest import WORLD, communicator, gaussian, identical, step_by_step, verdict

P, ME = WORLD.size, WORLD.rank
N = 40_003


def sixteenths(n: int, rank: int = ME, dtype: str = "float32") -> np.ndarray:
    """Return values of which every sum of a few ranks is exact, in float16 too; no zero among them is negative."""
    return (np.round(gaussian(n, rank) * 16) / 16 + 0.0).astype(dtype)


def algorithms(comm: hc.Communicator) -> list[str]:
    codec = hc.get_codec("exponent")
    return [
        a.name for a in ALGORITHMS["all_reduce"].values() if refusal(a, comm.session.topology, codec) is None
    ]


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
    for policy in ("none", "exact", "exponent"):
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
        if policy.startswith("exponent") and P > 1:
            used = {row.op for row in comm.stats() if row.codec == "exponent"}
            verdict(used >= {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"}, f"{used}")
        comm.Free()
    verdict(results["none"] == results["exact"] == results["exponent"])


def test_the_preset_tries_and_keeps_what_is_fastest_with_the_bits_of_none(make):
    plain, comm = make("none"), make("exact")
    x, want, got = sixteenths(N), np.empty(N, np.float32), np.empty(N, np.float32)
    plain.Allreduce(x, want)
    wrong = 0
    for _ in range(900):  # more than its trials take
        got[:] = -1
        comm.Allreduce(x, got)
        wrong += got.tobytes() != want.tobytes()
    verdict(not wrong, f"{wrong} all-reduces")
    if P > 1:
        reasons = {row.reason for row in comm.stats() if row.op == "all_reduce" and row.wire_bytes}
        verdict(any(" measured by operation " in reason for reason in reasons), f"{reasons}")


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


SCALARS = ("int8", "bounded:abs=1e-4", "topk:ratio=0.01")


def every_operation(comm: hc.Communicator | MPI.Intracomm, n: int, **codec: str) -> list[np.ndarray]:
    """Return what this rank gets of ``n`` values in every operation; of a send, into a buffer that is larger."""
    x, many = sixteenths(n, dtype="float64"), sixteenths(P * n, dtype="float64")
    room = [np.zeros(size) for size in (n, n, n, P * n, P * n, P * n, n, n, P * n + 1000)]
    comm.Allreduce(x, room[0], **codec)
    comm.Reduce(x, room[1], root=P - 1, **codec)
    comm.Reduce_scatter_block(many, room[2], **codec)
    comm.Allgather(x, room[3], **codec)
    comm.Alltoall(many, room[4], **codec)
    comm.Gather(x, room[5], P - 1, **codec)
    comm.Scatter(many, room[6], P - 1, **codec)
    room[7][:] = sixteenths(n, P - 1, "float64")
    comm.Bcast(room[7], P - 1, **codec)
    if P > 1:
        request = comm.Isend(x, (ME + 1) % P, **codec)
        comm.Recv(room[8], (ME - 1) % P, **codec)
        request.Wait()
    return room


@pytest.mark.parametrize("spec", SCALARS)
def test_a_codec_as_policy_leaves_scalars_exact(spec):
    """At both ends alike, whatever the room of a receive; a codec of the call's own takes any size."""
    comm = hc.Communicator(WORLD, spec, timeout=30.0)
    for n in (1, 3, 4095 // 8 // P):
        verdict(all(map(np.array_equal, every_operation(comm, n), every_operation(WORLD, n))), f"{n}")
    verdict({row.codec for row in comm.stats()} == {"none"}, str(comm.stats()))
    got = every_operation(comm, 3, codec="int4:block=64")
    verdict(P == 1 or not all(map(np.array_equal, got, every_operation(WORLD, 3))))
    every_operation(comm, 4096 // 8)
    every = {
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
    }
    used = {row.op for row in comm.stats() if row.codec == hc.get_codec(spec).spec}
    verdict(P == 1 or used - {"recv"} == every | {"send"}, str(used))
    comm.Free()


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("way", [lambda comm: comm, step_by_step], ids=["engine", "step by step"])
def test_small_parts_of_unlike_sizes_are_exact(way):
    """Ranks know the sizes of their own parts alone; both ends know that of a message."""
    comm = way(hc.Communicator(WORLD, "int8:block=64", timeout=30.0))
    counts = [(3, 5000, 0, 511, 513)[r] for r in range(P)]
    small = [q for q, n in enumerate(counts) if n * 8 < 4096]
    everything = np.concatenate([sixteenths(n, r, "float64") + np.pi for r, n in enumerate(counts)])
    starts = np.cumsum([0, *counts])
    mine, gathered = everything[starts[ME] : starts[ME + 1]].copy(), np.zeros(sum(counts))
    comm.Gatherv(mine, [gathered, counts], root=0)
    scattered = np.zeros(counts[ME])
    comm.Scatterv([everything, counts], scattered, root=0)
    outgoing, incoming = np.tile(mine, P), np.zeros(sum(counts))  # to each rank the same part
    comm.Alltoallv([outgoing, [counts[ME]] * P], [incoming, counts])

    def exact(got: np.ndarray, q: int) -> bool:
        return got.tobytes() == everything[starts[q] : starts[q + 1]].tobytes()

    for q in range(P):
        there = slice(starts[q], starts[q + 1])
        kept = q in small
        verdict(ME != 0 or q == 0 or exact(gathered[there], q) == kept, f"gather of {q}")
        verdict(q == ME or exact(incoming[there], q) == kept, f"all-to-all of {q}")
    verdict(ME == 0 or exact(scattered, ME) == (ME in small))
    verdict(ME == 0 or ME in small or np.abs(scattered - mine).max() < 0.1)
    used = {row.op for row in comm.stats() if row.codec != "none"}
    verdict(used == {"gather", "scatter", "all_to_all"}, str(used))
    comm.Free()
