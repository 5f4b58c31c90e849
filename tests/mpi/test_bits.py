"""All ranks end with the same bits: every codec by every algorithm, and again with the same when it is repeated; every
reduction of every type. The values have NaN, infinities and zeros of both signs among them.

With HC_EXAMPLES set: every form of each codec, and every algorithm wherever it can be used, not only once.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.schedules.registry import ALGORITHMS, SELECTABLE
from tests.codecs.common import SPECS, with_specials
from tests.mpi.conftest import WORLD, communicator, gaussian, identical, step_by_step, verdict
from tests.mpi.hosts import Hosts

SIZES = [0, 3, 1000, 1001, 20_001]
LAYOUTS = {
    "one host": [0] * WORLD.size,
    "two hosts": [2 * r // WORLD.size for r in range(WORLD.size)],
    "turn about": [r % 2 for r in range(WORLD.size)],
}


THOROUGH = "HC_EXAMPLES" in os.environ
CODECS = SPECS if THOROUGH else list({spec.split(":")[0]: spec for spec in reversed(SPECS)}.values())
REPEATED = SIZES if THOROUGH else [1001]


@functools.cache
def values(n: int) -> np.ndarray:
    """Return this rank's values, not to be written to; in half of the sizes they are finite."""
    x = gaussian(n)
    return with_specials(x, WORLD.rank, 0.001 if n > 1001 else 0.3) if n % 2 else x


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
    names = [a.name for a in ALGORITHMS[op].values() if refusal(a, comm.session.topology, codec) is None]
    new = [name for name in names if THOROUGH or (op, spec, name) not in done]
    done.update((op, spec, name) for name in new)
    return [None] if spec == "none" and new else list(new)


@pytest.mark.parametrize("op", SELECTABLE)
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


# -- reductions ----------------------------------------------------------------------------------

P, ME = WORLD.size, WORLD.rank
LENGTHS = [1, 3, 1000, 70_001]
REAL = ["float32", "float64", "float16", "bfloat16"]
COMPLEX = ["complex64", "complex128"]
OPS: dict[str, Any] = {"max": MPI.MAX, "min": MPI.MIN, "product": MPI.PROD, "sum": MPI.SUM, "avg": "avg"}
FORMS: dict[str, Callable[..., Any]] = {
    "blocking": lambda comm, x, y, op: comm.Allreduce(x, y, op),
    "non-blocking": lambda comm, x, y, op: comm.Iallreduce(x, y, op).Wait(),
    "framed": lambda comm, x, y, op: comm.Allreduce(x, y, op, codec="none", algorithm="direct"),
}


@functools.cache
def numbers(n: int, rank: int, dtype: str) -> Any:
    """Return a rank's numbers: an array, or a tensor of bfloat16."""
    parts = 2 if dtype in COMPLEX else 1
    real = {"complex64": "float32", "complex128": "float64", "bfloat16": "float32"}.get(dtype, dtype)
    x = with_specials(gaussian(parts * n, rank, dtype=real), rank, 0.3)
    if n > 2 and dtype not in COMPLEX:
        x[-2:] = -0.0 if rank else 0.0
        x[-1] = np.nan if rank == P - 1 else 1
    return torch.from_numpy(x).to(torch.bfloat16) if dtype == "bfloat16" else x.view(dtype)


def wide(x: Any) -> np.ndarray:
    return x.float().numpy() if isinstance(x, torch.Tensor) else x


def right(kind: str, dtype: str, n: int, got: Any) -> bool:
    """Tell whether the larger or the smaller of all ranks' values is as promised: NaN spreads, +0 is above -0."""
    if kind not in ("max", "min"):
        return True
    ranks = np.stack([wide(numbers(n, r, dtype)) for r in range(P)])
    with np.errstate(invalid="ignore"):
        want = (np.max if kind == "max" else np.min)(ranks, axis=0)
    zeros, back = want == 0, wide(got)
    negative = ((ranks == 0) & np.signbit(ranks)).any(axis=0)
    positive = ((ranks == 0) & ~np.signbit(ranks)).any(axis=0)
    below = negative if kind == "min" else ~positive
    return bool(np.array_equal(back, want, equal_nan=True) and (np.signbit(back) == below)[zeros].all())


@pytest.mark.parametrize("way", [lambda comm: comm, step_by_step], ids=["engine", "step by step"])
@pytest.mark.parametrize("kind", OPS)
def test_every_reduction_of_every_type(kind, way):
    """By the engine, and where it is not in use."""
    comm = way(communicator())
    wrong = []
    for dtype in REAL + (COMPLEX if kind not in ("max", "min") else []):
        for n in LENGTHS:
            for form, call in FORMS.items():
                x = numbers(n, ME, dtype)
                y = x * 0 if isinstance(x, torch.Tensor) else np.zeros_like(x)
                call(comm, x, y, OPS[kind])
                raw = y.view(torch.int16).numpy() if isinstance(y, torch.Tensor) else y
                if not (identical(raw) and right(kind, dtype, n, y)):
                    wrong.append((dtype, n, form))
                z = x.clone() if isinstance(x, torch.Tensor) else x.copy()
                call(comm, MPI.IN_PLACE, z, OPS[kind])
                again = z.view(torch.int16).numpy() if isinstance(z, torch.Tensor) else z
                if P > 1 and not identical(again):
                    wrong.append((dtype, n, form, "in place"))
    comm.Free()
    verdict(not wrong, str(wrong))


@pytest.mark.parametrize("kind", ["max", "min"])
def test_larger_and_smaller_by_the_other_operations(make, kind):
    """A part of the result each, the root's, prefixes, persistent operations, and buffers that only MPI understands."""
    comm, op = make(), OPS[kind]
    reference = np.max if kind == "max" else np.min
    wrong = []
    for n in (1, 3, 1000):
        for dtype in ("float32", "float64", "float16"):
            whole = [numbers(n * P, r, dtype) for r in range(P)]
            want = reference(np.stack(whole), axis=0)[ME * n : (ME + 1) * n]
            part = np.empty(n, dtype)
            comm.Reduce_scatter_block(whole[ME], part, op)
            wrong += (
                [] if np.array_equal(part, want, equal_nan=True) else [("reduce_scatter_block", n, dtype)]
            )
            comm.Reduce_scatter(whole[ME], part, [n] * P, op)
            wrong += [] if np.array_equal(part, want, equal_nan=True) else [("reduce_scatter", n, dtype)]
            x, root = numbers(n, ME, dtype), P - 1
            y = np.empty(n, dtype)
            comm.Reduce(x, y if root == ME else None, op, root=root)
            wrong += [] if root != ME or right(kind, dtype, n, y) else [("reduce", n, dtype)]
            plan = comm.plan_allreduce((n,), dtype, op)
            plan.send[...] = x
            plan.run()
            wrong += [] if identical(plan.recv) and right(kind, dtype, n, plan.recv) else [("plan", n, dtype)]
            plan.free()
            if dtype == "float16":
                continue
            comm.Scan(x, y, op)
            upto = reference(np.stack([numbers(n, r, dtype) for r in range(ME + 1)]), axis=0)
            wrong += [] if np.array_equal(y, upto, equal_nan=True) else [("scan", n, dtype)]
            y[:] = 7
            comm.Exscan(x, y, op)
            if ME:
                before = reference(np.stack([numbers(n, r, dtype) for r in range(ME)]), axis=0)
                wrong += [] if np.array_equal(y, before, equal_nan=True) else [("exscan", n, dtype)]
    verdict(not wrong, str(wrong))


def test_place_of_the_largest_and_long_doubles(make):
    comm = make()
    pair = np.dtype([("value", np.float32), ("index", np.int32)])
    mine = np.zeros(3, pair)
    mine["value"] = [ME, np.nan if ME == P - 1 else 1, 5]
    mine["index"] = ME
    got = np.zeros(3, pair)
    comm.Allreduce([mine, 3, MPI.FLOAT_INT], [got, 3, MPI.FLOAT_INT], MPI.MAXLOC)
    verdict(identical(got.view(np.uint8)) and got["index"].tolist() == [P - 1, P - 1, 0], str(got))
    x = np.array([np.nan if ME == P - 1 else 1, -0.0 if ME else 0.0], np.longdouble)
    comm.Allreduce([x, MPI.LONG_DOUBLE], [y := np.empty_like(x), MPI.LONG_DOUBLE], MPI.MAX)
    verdict(bool(np.isnan(y[0])) and not np.signbit(y[1]), str(y))
