"""Balanced parts in the compiled engine: the bits and memories of the run in Python, owners, and damaged sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.engine.groups import native_engine
from hybridcomp.policy.toml import parse_policy
from hybridcomp.variables import SHARED_MEMORY
from tests.mpi.conftest import WORLD, gaussian, identical, step_by_step, verdict
from tests.mpi.engine.test_compiled import both

__all__ = ["both"]

P, RANK = WORLD.size, WORLD.rank
CODECS = [
    "topk:ratio=0.1",
    "threshold:abs=1.5",
    "threshold:rel=1",
    "sidco:ratio=0.05",
    "topk:ratio=0.2,values=int8",
    "threshold:abs=1,values=fp16",
]
SIZES = [0, 1, 2, 1001, 30_003]
SHORT_REGIONS = 768  # bytes: 192 floats, so that regions share blocks of a memory in 8 bits


def bits(array: Any) -> bytes:
    return np.asarray(hc.arrays.flatten(array).data).tobytes()


def crowded(n: int, where: float) -> np.ndarray:
    """Return values of which most that a codec sends lie in a tenth of the data."""
    x = gaussian(n)
    near = np.abs(np.arange(n) / n - where) < 0.05
    return np.where(near, x, 0.01 * x).astype(np.float32)


def key(codec: str, n: int, dtype: str = "float32") -> OperationKey:
    return OperationKey("all_reduce", hc.get_codec(codec), True, hc.arrays.as_dtype(dtype), (n,))


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("codec", CODECS)
def test_the_engine_has_the_bits_of_python(both, codec):
    compiled, generated, _ = both
    wrong = []
    for n in SIZES:
        for dtype in ("float32", "float64", "float16"):
            assert P == 1 or compiled.session.programs.find(key(codec, n, dtype), "oktopk") is not None
            for op in (MPI.SUM, "avg"):
                x, results = gaussian(n, dtype=dtype), []
                for comm in (compiled, generated):
                    apart, in_place = np.full_like(x, 7), x.copy()
                    comm.Allreduce(x, apart, op, codec=codec, algorithm="oktopk")
                    comm.Allreduce(MPI.IN_PLACE, in_place, op, codec=codec, algorithm="oktopk")
                    results += [bits(apart), bits(in_place)]
                if len(set(results)) > 1:
                    wrong.append((n, dtype, op))
    assert generated.session.programs is None
    verdict(not wrong, str(wrong))


@pytest.mark.ranks(most=4)
def test_bfloat16_has_the_bits_of_python(both):
    torch = pytest.importorskip("torch")
    compiled, generated, _ = both
    for codec in ("topk:ratio=0.1", "topk:ratio=0.2,values=int8"):
        pair = [torch.from_numpy(gaussian(9_001)).to(torch.bfloat16) for _ in range(2)]
        for comm, x in zip((compiled, generated), pair, strict=True):
            comm.Allreduce(MPI.IN_PLACE, x, "avg", codec=codec, algorithm="oktopk")
        verdict(bits(pair[0]) == bits(pair[1]), codec)


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("where", [0.0, 0.31, 1.0])
def test_some_ranks_own_nothing(both, where):
    """All that is sent lies in one place: the same owners, found in C++ and in Python."""
    compiled, generated, _ = both
    for codec in ("threshold:abs=0.5", "threshold:abs=0.5,values=int8"):
        x = crowded(50_000, where)
        got, want = np.empty_like(x), np.empty_like(x)
        for comm, out in ((compiled, got), (generated, want)):
            comm.Allreduce(x, out, codec=codec, algorithm="oktopk")
        verdict(identical(got) and bits(got) == bits(want), codec)
    sent, expected = [comm.stats()[0].wire_bytes for comm in (compiled, generated)]
    verdict(abs(sent - expected) <= 64 * P, f"{sent} bytes, not {expected}")


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("codec", ["topk:ratio=0.1", "threshold:abs=1.5", "topk:ratio=0.2,values=int8"])
@pytest.mark.parametrize("form", ["ef", "loco", "dgc", "dgc:momentum=0", "ef-sgdm"])
def test_the_engine_has_in_python_memories(make, monkeypatch, form, codec):
    if P == 1:
        return
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: SHORT_REGIONS)
    text = f'min_bytes = 0\n[dp]\nall_reduce = {{ codec = "{codec}", feedback = "{form}" }}\n'
    comms = [make(parse_policy(text, "test")) for _ in range(2)]
    step_by_step(comms[1])
    wrong = []
    for op in (MPI.SUM, "avg"):
        for dtype in ("float32", "float64", "float16"):
            for step in range(4):
                x = gaussian(3_001, seed=step, dtype=dtype)
                if step == 2:
                    x[77] = np.inf
                name, results = f"{dtype} {op == 'avg'}", []
                for comm in comms:
                    results.append(x.copy())
                    comm.Allreduce(MPI.IN_PLACE, results[-1], op, name=name, algorithm="oktopk")
                if bits(results[0]) != bits(results[1]):
                    wrong.append((op, dtype, step))
    states = [comm.feedback.state_dict() for comm in comms]
    wrong += [name for name, value in states[0].items() if value.tobytes() != states[1][name].tobytes()]
    verdict(not wrong and len(states[0]) > 0, str(wrong))


def test_many_operations_at_once(make):
    """Messages of operations in flight do not meet each other's, whatever each one's owners are."""
    comm = make("threshold:abs=0.5", timeout=60.0)
    arrays = [crowded(20_000 + i, (i % 10) / 10) for i in range(60)]
    alone = [x.copy() for x in arrays]
    for request in [comm.Iallreduce(MPI.IN_PLACE, x, algorithm="oktopk") for x in arrays][::-1]:
        request.wait()
    for x in alone:
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="oktopk")
    verdict(identical(np.concatenate(arrays)))
    verdict(all(bits(x) == bits(y) for x, y in zip(arrays, alone, strict=True)))


@pytest.mark.parametrize("codec", ["topk:ratio=0.1", "topk:ratio=0.1,values=int8"])
def test_damaged_sizes_are_an_error_that_names_the_peer(make, monkeypatch, codec):
    """Rank 0 sends the sizes first."""
    if P == 1:
        return
    monkeypatch.setenv(SHARED_MEMORY.name, "0")
    comm = make(codec, timeout=10.0)
    if RANK == 0:
        native_engine().engine_damage(1, 0)
    caught: hc.HybridcompError | None = None
    try:
        comm.Allreduce(MPI.IN_PLACE, gaussian(50_000), algorithm="oktopk")
    except hc.HybridcompError as error:
        caught = error
    said = "rank 1 got damaged sizes of messages from rank 0: damaged message: CRC"
    kind = hc.WireError if RANK == 1 else hc.RemoteError
    verdict(isinstance(caught, kind) and said in str(caught), repr(caught))
    x = gaussian(1000)  # the communicator goes on
    comm.Allreduce(MPI.IN_PLACE, x, algorithm="oktopk")
    verdict(identical(x))


def test_another_number_of_regions_is_named(make):
    if P == 1:
        return
    comm = make("topk:ratio=0.1", timeout=10.0)
    caught = ""
    try:
        comm.Allreduce(MPI.IN_PLACE, gaussian(50_000 if RANK else 1_000), algorithm="oktopk")
    except (hc.MismatchError, hc.RemoteError) as error:
        caught = str(error)
    verdict("uint32" in caught and "expects" in caught, caught)
