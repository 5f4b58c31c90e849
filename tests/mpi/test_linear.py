"""All-reduces by linear codecs, and the same by MPI's own Allreduce."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.arrays import Flat, flatten
from hybridcomp.codecs.linear.base import UFUNCS, Reduced, Reduction, Round, Terms, reduce_all
from hybridcomp.codecs.linear.lattice import LatticeCodec
from hybridcomp.collectives import starting
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy.toml import parse_policy
from tests.mpi.conftest import WORLD, gaussian, identical, relative_error, total, verdict
from tests.mpi.engine.test_compiled import algorithms, both

__all__ = ["both"]

OPS = {"sum": MPI.SUM, "max": MPI.MAX, "or": MPI.BOR}
SPECS = [
    "lattice",
    "lattice:bits=16:rounding=stochastic",
    "randomblock:ratio=0.2",
    "sketch",
    "sketch:form=packed",
    "sketch:index=bloom:density=0.08",
]


def sparse(n: int, rank: int = WORLD.rank, dtype: str = "float32") -> np.ndarray:
    x = np.round(gaussian(n, rank) * 20)
    return np.where(np.random.default_rng([rank, n]).random(n) < 0.02, x, 0).astype(dtype)


def every(make_part, n: int) -> list[np.ndarray]:
    return [make_part(n, r) for r in range(WORLD.size)]


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 300_001])
@pytest.mark.parametrize("spec", SPECS)
def test_linear_sum_is_the_simulations(make, spec, n):
    """The ranks get what reduce_all gives, to the bit: floats are summed in rank order there, too."""
    comm = make(spec)
    part = sparse if "sketch" in spec else gaussian
    send, recv = part(n), np.full(n, np.nan, np.float32)
    comm.Allreduce(send, recv)
    verdict(identical(recv), "different bits")
    verdict(np.array_equal(send, part(n)), "the send buffer changed")
    if WORLD.size > 1:
        want = reduce_all(spec, every(part, n))[0].total
        # The owner of a shard begins with its own part: in another order floats may differ in the last bits.
        verdict(np.allclose(recv, want, rtol=1e-6, atol=1e-6))
        verdict(recv.tobytes() == want.tobytes() or "randomblock" in spec, "not the simulation's bits")


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("spec", SPECS)
def test_linear_dtypes_and_averages(make, spec, dtype):
    comm = make(spec)
    n = 20_003
    recv = np.empty(n, dtype)
    comm.Allreduce(sparse(n, dtype=dtype), recv, "avg")
    verdict(identical(recv))
    want = np.sum([p.astype(np.float64) for p in every(sparse, n)], axis=0) / WORLD.size
    if "randomblock" not in spec:
        verdict(relative_error(recv, want) < (0.2 if "lattice" in spec else 1e-3))


def test_linear_sketch_of_whole_numbers_is_exact(make):
    comm = make("sketch")
    n = 500_000
    x = sparse(n)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(np.array_equal(x, np.sum(every(sparse, n), axis=0)))
    if WORLD.size > 1:
        row = comm.stats()[0]
        verdict(row.codec == "sketch:load=0.6" and row.wire_bytes * 3 < row.plain_bytes, f"{row}")


def test_linear_wire_bytes(make):
    for spec, share in (("lattice", 4), ("randomblock:ratio=0.1", 10)):
        comm = make(spec)
        comm.Allreduce(MPI.IN_PLACE, gaussian(1_000_000))
        if WORLD.size > 1:
            row = comm.stats()[0]
            verdict(0.95 < row.plain_bytes / row.wire_bytes / share < 1.01, f"{row}")


@pytest.mark.parametrize("spec", ["powersgd:rank=2", *SPECS])
def test_linear_by_mpis_own_allreduce(make, spec):
    """A reduction's rounds are plain arrays: MPI sums them as well as we do."""
    part = sparse if "sketch" in spec else gaussian
    x = part(9000).reshape(90, 100)
    steps = hc.get_codec(spec).reduction(flatten(x), ranks=WORLD.size, rank=WORLD.rank)
    try:
        following = next(steps)
        while True:
            sums = [WORLD.Iallreduce(MPI.IN_PLACE, one.array, OPS[one.op]) for one in following.together]
            MPI.Request.Waitall(sums)
            following = next(steps)
    except StopIteration as end:
        got = end.value.total
    verdict(identical(got))
    if WORLD.size > 1:
        ours = np.empty_like(x)
        make("none").Allreduce(x, ours, codec=spec)
        verdict(relative_error(got, ours.reshape(-1).astype(np.float64)) < 1e-4)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", *SPECS])
def test_linear_operations_in_flight_together(make, spec):
    """Rounds of several are under way at once, and waited for in another order on each rank."""
    comm = make(spec)
    part = sparse if "sketch" in spec else gaussian
    shapes = [(100, 300 + 10 * i) for i in range(6)]
    sent = [part(a * b).reshape(a, b) for a, b in shapes]
    alone = []
    for x in sent:
        alone.append(np.empty_like(x))
        comm.Allreduce(x, alone[-1])
    got = [np.empty_like(x) for x in sent]
    requests = [comm.Iallreduce(x, y) for x, y in zip(sent, got, strict=True)]
    order = np.random.default_rng(WORLD.rank).permutation(len(requests))
    for i in order:
        requests[i].wait()
    verdict(all(a.tobytes() == b.tobytes() for a, b in zip(alone, got, strict=True)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", ["powersgd", *SPECS])
def test_linear_overflow_is_seen_by_all(make, spec, bad):
    comm = make(spec)
    x = gaussian(10_000).reshape(100, 100)
    if WORLD.rank == WORLD.size - 1:
        x.reshape(-1)[4321] = bad
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(not np.isfinite(x.reshape(-1)[4321]))
    verdict(identical(np.isfinite(x)))


@pytest.mark.parametrize("codec", ["randomblock:ratio=0.25", "lattice:bits=8", "powersgd:rank=2"])
def test_linear_feedback_sends_in_the_end_what_was_meant(make, codec):
    comm = make(parse_policy(f'[dp]\nall_reduce = {{ codec = "{codec}", feedback = "ef" }}\n', "test"))
    n, steps = 2500, 60
    want = total(n) / WORLD.size
    sent = np.zeros(n)
    for step in range(steps):
        comm.step = step
        x = gaussian(n).reshape(50, 50)
        comm.Allreduce(MPI.IN_PLACE, x, "avg", name="weight")
        verdict(identical(x))
        sent += x.reshape(-1)
    limit = {"l": 1e-3, "r": 0.2, "p": 0.6}[codec[0]]
    verdict(relative_error(sent / steps, want) < limit, f"{relative_error(sent / steps, want)}")


def test_linear_codecs_only_all_reduce(make):
    comm = make("lattice")
    n = 70_000
    recv = np.empty(n, np.float32)
    comm.Reduce_scatter_block(np.tile(gaussian(n), WORLD.size), recv)
    verdict(relative_error(recv, total(n)) < 1e-6)
    if WORLD.size > 1:
        verdict("lattice only all-reduces" in comm.stats()[0].reason)
    gathered = np.empty(n * WORLD.size, np.float32)
    comm.Allgather(gaussian(n), gathered)  # as messages
    verdict(identical(gathered))
    verdict(relative_error(gathered, np.concatenate(every(gaussian, n))) < 0.03)
    if WORLD.size > 1:
        with pytest.raises(CodecMismatchError, match="powersgd"):
            comm.Allreduce(MPI.IN_PLACE, np.ones(100, np.float32), codec="powersgd:rank=4")


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def integers(n: int, dtype: str, rank: int) -> np.ndarray:
    """Return integers of the whole range, so that sums wrap around."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.random.default_rng([n, rank]).integers(low, high, n, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_engine_sums_integers_by_every_algorithm(both, monkeypatch, dtype):
    if WORLD.size == 1:
        return
    comm, _, topology = both
    rounds: list[Round] = []

    def reduce(self: LatticeCodec, x: Flat, terms: Terms) -> Reduction:
        yield from rounds
        return Reduced(np.zeros(x.size, np.float32), None)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("integers do not go by the engine")

    monkeypatch.setattr(LatticeCodec, "reduce", reduce)
    monkeypatch.setattr(starting, "run_schedule", refuse)
    wrong = []
    for algorithm in algorithms(topology, "none"):
        comm.session._chooser._forced = {"all_reduce": algorithm}
        comm.session._chooser._choices.clear()
        for op in UFUNCS if dtype.startswith("u") else ("sum",):
            for n in (1, 130, 10_001):
                array = integers(n, dtype, WORLD.rank)
                rounds[:] = [Round(array, op)]
                comm.Allreduce(MPI.IN_PLACE, np.zeros(8, np.float32), codec="lattice")
                want = functools.reduce(UFUNCS[op], [integers(n, dtype, q) for q in range(WORLD.size)])
                if array.tobytes() != want.tobytes():
                    wrong.append((algorithm, op, n))
    verdict(not wrong, str(wrong))


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "randomblock" not in spec])
def test_linear_sums_of_integers_have_the_bits_of_python(both, spec):
    compiled, generated, _ = both
    part, wrong = sparse if "sketch" in spec else gaussian, []
    for n in (1, 130, 10_001):
        for dtype in ("float32", "float64", "float16"):
            x = part(n, dtype=dtype)
            got, want = np.empty_like(x), np.empty_like(x)
            compiled.Allreduce(x, got, "avg", codec=spec)
            generated.Allreduce(x, want, "avg", codec=spec)
            if got.tobytes() != want.tobytes():
                wrong.append((n, dtype))
    verdict(not wrong, str(wrong))
