from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp import native
from hybridcomp.codecs import cast
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy.toml import parse_policy
from tests.mpi.conftest import WORLD, gaussian, identical, relative_error, total, verdict

SIZES = [0, 1, 2, 3, 7, 63, 65, 1000, 65_537, 700_001]
# relative L2 error of one encoding of each rank's part and one of the sum, on Gaussian data
LOSSY = {"fp16": 1e-3, "bf16": 6e-3, "int8:block=128": 0.012, "int4:block=128": 0.22, "int8:block=32": 0.012}
DTYPES = ["float32", "float64", "float16"]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_sum_is_near_and_identical(make, codec, n):
    comm = make(codec)
    send, recv = gaussian(n), np.full(n, np.nan, np.float32)
    comm.Allreduce(send, recv)
    bound = LOSSY[codec] * (1 if n > 60 else 20)  # few values may nearly cancel in their sum
    verdict(identical(recv), "different bits")
    verdict(relative_error(recv, total(n)) <= bound, f"{relative_error(recv, total(n))}")
    verdict(np.array_equal(send, gaussian(n)), "the send buffer changed")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["none", "lossless", "mpc", "exponent", "int8:block=128", "topk:ratio=0.5"])
def test_dtypes(make, codec, dtype):
    comm = make(codec)
    n = 40_003
    recv = np.empty(n, dtype)
    comm.Allreduce(gaussian(n, dtype=dtype), recv)
    exact = 1e-3 if dtype == "float16" else 1e-6
    allowed = {"int8:block=128": 0.013, "topk:ratio=0.5": 0.6}
    verdict(identical(recv))
    verdict(relative_error(recv, total(n, dtype=dtype)) < allowed.get(codec, exact))


@pytest.mark.parametrize("n", [5, 50_000, 100_000])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_bfloat16_tensors(make, codec, n):
    torch = pytest.importorskip("torch")
    comm = make(codec)
    x = torch.from_numpy(gaussian(n)).to(torch.bfloat16)
    comm.Allreduce(MPI.IN_PLACE, x)
    want = np.sum(
        [torch.from_numpy(gaussian(n, r)).to(torch.bfloat16).double().numpy() for r in range(WORLD.size)],
        axis=0,
    )
    verdict(identical(x.view(torch.uint8).numpy()))
    verdict(relative_error(x.double().numpy(), want) < 0.02)


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "topk:ratio=0.1", "fp16"])
def test_in_place_equals_out_of_place_and_repeats(make, codec):
    comm = make(codec)
    n = 300_001
    first, second, third = np.empty(n, np.float32), gaussian(n), np.empty(n, np.float32)
    comm.Allreduce(gaussian(n), first)
    comm.Allreduce(MPI.IN_PLACE, second)
    comm.Allreduce(gaussian(n), third)
    verdict(first.tobytes() == second.tobytes() == third.tobytes())


def test_overlapping_send_and_receive(make):
    comm = make("int8")
    n = 100_000
    memory = np.zeros(n + 10, np.float32)
    memory[10:] = gaussian(n)
    comm.Allreduce(memory[10:], memory[:n])
    verdict(identical(memory[:n]))
    verdict(relative_error(memory[:n], total(n)) < 0.012)


def test_unaligned_and_strided_and_read_only(make):
    comm = make("int8")
    n = 70_001
    raw = np.zeros(4 * n + 1, np.uint8)
    unaligned = raw[1:].view(np.float32)
    unaligned[:] = gaussian(n)
    given = gaussian(n)
    want = np.empty(n, np.float32)
    comm.Allreduce(given, want)
    got = np.empty(n, np.float32)
    given.flags.writeable = False
    comm.Allreduce(given, got)
    verdict(got.tobytes() == want.tobytes(), "read-only")
    with pytest.raises(BufferError, match="contiguous"):  # as mpi4py says it
        comm.Allreduce(np.zeros(2 * n, np.float32)[::2], got)
    comm.Allreduce(MPI.IN_PLACE, unaligned)
    verdict(unaligned.tobytes() == want.tobytes(), "unaligned")
    with pytest.raises(BufferError, match="contiguous"):  # as mpi4py says it
        comm.Allreduce(got, np.empty(2 * n, np.float32)[::2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4", "topk:ratio=0.1"])
def test_overflow_is_seen_by_all(make, codec, bad):
    comm = make(codec)
    x = gaussian(10_000)
    if WORLD.rank == WORLD.size - 1:
        x[4321] = bad
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(not np.isfinite(x[4321]))
    verdict(identical(np.isfinite(x)))


def test_average(make):
    for codec, bound in (("none", 1e-6), ("int8", 0.012)):
        comm = make(codec)
        n = 70_000
        got = np.empty(n, np.float32)
        comm.Allreduce(gaussian(n), got, "avg")
        verdict(relative_error(got, total(n) / WORLD.size) < bound)
        verdict(identical(got))


@pytest.mark.parametrize("codec", ["int8", "mpc", "lossless", "exponent"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "complex64"])
def test_other_dtypes_are_exact(make, dtype, codec):
    comm = make(codec)
    x = (np.arange(50_000) % 7 + WORLD.rank).astype(dtype)
    comm.Allreduce(MPI.IN_PLACE, x)
    want = np.sum([(np.arange(50_000) % 7 + r) for r in range(WORLD.size)], axis=0).astype(dtype)
    verdict(np.array_equal(x, want))
    if WORLD.size > 1:
        reason = "not floating-point" if codec == "int8" else f"sums of {dtype} are MPI's own"
        assert reason in comm.stats()[0].reason


@pytest.mark.parametrize(
    ("op", "fold"), [(MPI.MAX, np.maximum), (MPI.MIN, np.minimum), (MPI.PROD, np.multiply)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_operations_are_exact(make, op, fold, dtype):
    comm = make("int8")
    parts = [np.round(gaussian(60_000, r) * 2).astype(dtype) for r in range(WORLD.size)]
    got = np.empty(60_000, dtype)
    comm.Allreduce(parts[WORLD.rank], got, op)
    want = parts[0]
    for part in parts[1:]:
        want = fold(want, part)
    verdict(np.array_equal(got, want))


def test_feedback_sends_in_the_end_what_was_meant(make):
    comm = make(parse_policy('[dp]\nall_reduce = { codec = "int4:block=128", feedback = "ef" }\n', "test"))
    n, steps = 20_000, 40
    sent, meant, single = np.zeros(n), np.zeros(n), 0.0
    for step in range(steps):
        x = gaussian(n, seed=step)
        want = total(n, seed=step) / WORLD.size
        comm.Allreduce(MPI.IN_PLACE, x, "avg", name="weight")
        verdict(identical(x))
        sent += x
        meant += want
        single = max(single, float(np.linalg.norm(x - want)))
    if WORLD.size > 1:
        assert single > 0.1 * np.linalg.norm(meant) / np.sqrt(steps)  # the codec is lossy at each step
    # The loss after any number of steps is the residual of the last one.
    verdict(bool(np.linalg.norm(sent - meant) <= 3 * single + 1e-6))


def test_low_rank(make):
    comm = make("powersgd:rank=4")
    rng = np.random.default_rng(3)
    base = [rng.standard_normal((96, 3)) @ rng.standard_normal((3, 130)) for _ in range(1)]
    mine = (base[0] * (WORLD.rank + 1)).astype(np.float32)
    got = np.empty_like(mine)
    comm.Allreduce(mine, got)
    want = base[0] * sum(range(1, WORLD.size + 1))
    verdict(identical(got))
    verdict(relative_error(got, want) < 1e-5)
    if WORLD.size > 1:
        row = comm.stats()[0]
        assert row.codec.startswith("powersgd")
        assert row.wire_bytes * 4 < row.plain_bytes
        with pytest.raises(CodecMismatchError, match="powersgd"):
            comm.Allreduce(MPI.IN_PLACE, np.ones(100, np.float32), codec="powersgd:rank=4")


def test_wrong_arguments(make):
    comm = make("int8")
    with pytest.raises(ValueError, match="send buffer has 3 elements, recv buffer 4"):
        comm.Allreduce(np.ones(3, np.float32), np.ones(4, np.float32))
    with pytest.raises(ValueError, match="send buffer is float64, receive buffer float32"):
        comm.Allreduce(np.ones(3), np.ones(3, np.float32))
    with pytest.raises(TypeError, match="expecting buffer"):
        comm.Allreduce(object(), np.ones(3, np.float32))


def test_mpi4py_buffer_lists(make):
    comm = make("int8")
    n = 70_000
    x = np.zeros(n + 5, np.float32)
    x[5:] = gaussian(n)
    comm.Allreduce(MPI.IN_PLACE, [x, (n, 5), MPI.FLOAT])
    want = np.empty(n, np.float32)
    comm.Allreduce([gaussian(n), MPI.FLOAT], [want, n, MPI.FLOAT])
    verdict(x[5:].tobytes() == want.tobytes() and not x[:5].any())


def test_sums_past_the_range_of_fp16_are_told_of(make):
    """Whoever encodes them: the first rank's data fit, and their sum does not."""
    if WORLD.size == 1:
        return
    comm, told = make(), []
    cast._listen()  # as the first encoder does, which is before this one
    for n in (1000, 200_000):
        native.kernels().listen_for_overflow(lambda: told.append(1))
        out = np.empty(n, np.float32)
        comm.Allreduce(np.full(n, 60000, np.float32), out, codec="fp16", algorithm="direct")
        verdict(bool(np.isinf(out).all()))
        verdict(sum(WORLD.allgather(len(told))) >= 1, f"{n}")
        told.clear()
    native.kernels().listen_for_overflow(cast._warn)
