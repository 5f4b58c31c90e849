"""``bounded``: the bound holds for what a caller gets, by every algorithm, of sums and averages of any ranks."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.agreement import making
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.topology import Topology
from tests.mpi.conftest import WORLD, communicator, identical, step_by_step, verdict

P, ME = WORLD.size, WORLD.rank
N = 64 * 20
ABS = 1e-3
KINDS = ("all_reduce", "reduce_scatter", "reduce")


@pytest.fixture(params=["one host", "two hosts"])
def comm(request, monkeypatch) -> hc.Communicator:
    """Make a communicator with small chunks; on an odd number of ranks one whose operations run in Python."""
    hosts = tuple(r * 2 // P if request.param == "two hosts" else 0 for r in range(P))
    monkeypatch.setattr(making, "discover", lambda comm, node: Topology(hosts))
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 1024)
    made = communicator()
    if P % 2:
        step_by_step(made)
    yield made
    made.Free()


def able(comm: hc.Communicator, kind: str, spec: str) -> list[str]:
    return [
        a.name
        for a in ALGORITHMS[kind].values()
        if refusal(a, comm.session.topology, hc.get_codec(spec)) is None
    ]


def shares(comm: hc.Communicator, kind: str, op: object) -> list[float]:
    """Return the bounds of each algorithm's messages."""
    promises = [ALGORITHMS[kind][name].promise for name in able(comm, kind, "bounded")]
    return [ABS / float(one.encodings(comm.session.topology, mean=op == "avg")) for one in promises]


def values(comm: hc.Communicator, kind: str, op: object, dtype: str, rank: int) -> np.ndarray:
    """Return one rank's values: rows that are near to steps' middles, where the errors of all ranks have one sign.

    Other rows have an element that is just within the bound or just beyond it, and are large, or tiny, or both.
    """
    drawn = np.random.default_rng([rank, 5])
    rows = [drawn.standard_normal(64) * scale for scale in (1e-6, ABS, 1.0, 1e3, 1e7)]
    rows.append(np.concatenate([rows[0][:32], rows[-1][:32]]))
    for share in shares(comm, kind, op):
        step = 2 * np.asarray(share, dtype) * np.asarray(1 - 2.0**-8, dtype)  # bounded.hpp of kernels/include
        whole = 2 * drawn.integers(-1000, 1000, 64)
        rows += [(whole + middle) * step for middle in (0.5, 0.5 - 1e-3, 0.5 + 1e-6)]
        rows.append(np.nextafter(whole * step + share, [np.inf, -np.inf] * 32))
    found = np.resize(np.concatenate(rows), N if kind != "reduce_scatter" else N * P)
    return found.astype(dtype)


def reduced(
    comm: hc.Communicator, kind: str, x: np.ndarray, op: object, spec: str, algorithm: str
) -> np.ndarray | None:
    """Return the result of a reduction where this rank has one."""
    out = np.empty(N, x.dtype)
    if kind == "all_reduce":
        comm.Allreduce(x, out, op, codec=spec, algorithm=algorithm)
        verdict(identical(out), f"{algorithm}: different bits")
    elif kind == "reduce_scatter":
        comm.Reduce_scatter_block(x, out, op, codec=spec, algorithm=algorithm)
    else:
        comm.Reduce(x, out, op, P - 1, codec=spec, algorithm=algorithm)
        return out if ME == P - 1 else None
    return out


def exact(comm: hc.Communicator, kind: str, op: object, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum or average of all ranks' values, and what an uncompressed one may be off by for its rounding."""
    every = np.array([values(comm, kind, op, dtype, r) for r in range(P)], np.longdouble)
    if kind == "reduce_scatter":
        every = every.reshape(P, P, N)[:, ME]
    ranks = P if op == "avg" else 1
    unit = np.finfo(dtype).eps / 2
    return every.sum(axis=0) / ranks, (P + 1) * unit * (np.abs(every).sum(axis=0) / ranks + ABS)


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", [MPI.SUM, "avg"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_of_the_result(comm, kind, op, dtype):
    """By every algorithm, and not by far: values on steps' middles come near to it where each message has its share."""
    x = values(comm, kind, op, dtype, ME)
    want, rounding = exact(comm, kind, op, dtype)
    for algorithm in able(comm, kind, "bounded"):
        got = reduced(comm, kind, x, op, f"bounded:abs={ABS}", algorithm)
        error = None if got is None else np.abs(got - want)
        verdict(error is None or bool(np.all(error <= ABS + rounding)), algorithm)
        largest = WORLD.allreduce(0.0 if error is None else float(error[rounding < ABS / 100].max()), MPI.MAX)
        # In a mean over few ranks the middles of parts are not those of their average.
        verdict(
            largest > ABS * (0.9 if op == MPI.SUM and kind != "all_reduce" else 0.4),
            f"{algorithm}: {largest}",
        )


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("coder", ["planes", "lz", "huffman"])
def test_a_bound_of_messages_is_wider(comm, coder):
    """Errors of all ranks add up, as documented; the message's bound holds for what was encoded once."""
    spec = f"bounded:abs={ABS}:coder={coder}:bound=message"
    step = 2 * np.float32(ABS) * np.float32(1 - 2.0**-8)
    x = (2 * np.random.default_rng(7).integers(-99, 99, N) + 0.499).astype(np.float32) * step
    for algorithm in able(comm, "all_reduce", spec):
        got = reduced(comm, "all_reduce", x, MPI.SUM, spec, algorithm)
        near = float(np.abs(got - P * x.astype(float)).max())
        verdict(near <= P * ABS * 1.001, algorithm)
    direct = reduced(comm, "reduce_scatter", np.tile(x, P), MPI.SUM, spec, "direct")
    verdict(float(np.abs(direct - P * x.astype(float)).max()) > (P - 1) * ABS * 0.9)
    every = np.empty(P * N, np.float32)
    comm.Allgather(x, every, codec=f"bounded:abs={ABS}:coder={coder}")
    verdict(0.9 * ABS < float(np.abs(every - np.tile(x.astype(float), P)).max()) <= ABS)


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_relative_bound_is_of_the_largest_range(comm, dtype):
    drawn = [np.random.default_rng([r, 9]).standard_normal(N).astype(dtype) for r in range(P)]
    every = np.array(drawn, np.float64)
    for op, ranks in ((MPI.SUM, 1), ("avg", P)):
        want = every.sum(axis=0) / ranks
        ranges = max(np.ptp(one) for one in (*every, want))
        rounding = (P + 2) * np.finfo(dtype).eps / 2 * np.abs(every).sum(axis=0).max()
        for algorithm in able(comm, "all_reduce", "bounded"):
            got = reduced(comm, "all_reduce", drawn[ME], op, "bounded:rel=0.05", algorithm)
            error = float(np.abs(got.astype(float) - want).max())
            verdict(0.005 * ranges < error <= 0.05 * ranges + rounding, f"{algorithm}: {error / ranges}")
