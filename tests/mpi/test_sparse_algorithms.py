"""All-reduce of sparse codecs by all-gather of messages, and in balanced parts."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.perfmodel import BUILT_IN
from hybridcomp.policy.toml import parse_policy
from hybridcomp.schedules.cuts import balanced
from hybridcomp.schedules.topology import Topology
from tests.cuda.common import host_array, to_device
from tests.mpi.conftest import WORLD, gaussian, identical, relative_error, total, verdict
from tests.mpi.device.devices import agrees, values

P = WORLD.size
ALGORITHMS = ["sparse", "oktopk"]
CODECS = [
    "topk:ratio=0.1",
    "threshold:abs=1.5",
    "threshold:rel=1",
    "sidco:ratio=0.05",
    "topk:ratio=0.2,values=int8",
]
SIZES = [0, 1, 2, P - 1, 63, 1000, 70_001]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
CHUNK_BYTES = 1 << 14
FORMS = ["ef", "dgc:momentum=0", "loco"]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of 16 KiB."""
    monkeypatch.setattr(choosing, "chunk_bytes", lambda profile, setting, algorithm: CHUNK_BYTES)


def policy(codec: str, feedback: str) -> hc.Policy:
    return parse_policy(f'[dp]\nall_reduce = {{ codec = "{codec}", feedback = "{feedback}" }}\n', "test")


def sent(codec: str, n: int, chunk: int, dtype: str = "float32") -> np.ndarray:
    """Return the sum in float64 of what the codec sends of all ranks' values, by chunks; one rank sends nothing."""
    c, result = hc.get_codec(codec if P > 1 else "none"), np.zeros(n)
    for rank in range(P):
        x = gaussian(n, rank, dtype=dtype)
        for i in range(0, n, chunk):
            part = x[i : i + chunk]
            result[i : i + chunk] += hc.decode(c.encode(part), out=np.empty(part.size))
    return result


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("codec", CODECS)
def test_all_sizes_give_one_sum(make, codec, algorithm):
    comm = make(codec)
    for n in SIZES:
        send, recv = gaussian(n), np.full(n, np.nan, np.float32)
        comm.Allreduce(send, recv, algorithm=algorithm)
        verdict(identical(recv), f"different bits of {n}")
        verdict(np.array_equal(send, gaussian(n)), "the send buffer changed")
        if algorithm == "sparse":
            verdict(np.allclose(recv, sent(codec, n, max(n, 1)), rtol=1e-6, atol=1e-6), f"{n}")
        else:
            verdict(relative_error(recv, total(n)) <= 1, f"{n}")  # nothing is made up
            verdict(n < 8 or np.count_nonzero(recv) > 0, f"{n}")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("codec", CODECS)
def test_many_chunks_of_the_sparse_sum(make, small_chunks, codec, dtype):
    comm = make(codec)
    n, itemsize = 100_003, np.dtype(dtype).itemsize
    got, mean = np.empty(n, dtype), gaussian(n, dtype=dtype)
    comm.Allreduce(gaussian(n, dtype=dtype), got, algorithm="sparse")
    comm.Allreduce(MPI.IN_PLACE, mean, "avg", algorithm="sparse")
    length = -(-n // -(-n * itemsize // CHUNK_BYTES))
    want = sent(codec, n, -(-length // 64) * 64, dtype)
    tolerance = 1e-3 if dtype == "float16" else 1e-6
    verdict(identical(got) and identical(mean))
    verdict(np.allclose(got, want, rtol=tolerance, atol=tolerance))
    verdict(np.allclose(mean, want / P, rtol=2 * tolerance, atol=tolerance))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_many_regions_keep_the_largest(make, small_chunks, dtype):
    comm = make("topk:ratio=0.5")
    n = 100_003
    got, mean = np.empty(n, dtype), gaussian(n, dtype=dtype)
    comm.Allreduce(gaussian(n, dtype=dtype), got, algorithm="oktopk")
    comm.Allreduce(MPI.IN_PLACE, mean, "avg", algorithm="oktopk")
    want = total(n, dtype=dtype)
    verdict(identical(got) and identical(mean))
    verdict(relative_error(got, want) < 0.6)
    verdict(relative_error(mean, want / P) < 0.6)
    verdict(0.4 * n < np.count_nonzero(got) <= (0.51 * n if P > 1 else n))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_tensors(make, algorithm):
    torch = pytest.importorskip("torch")
    comm = make("topk:ratio=0.5")
    x = torch.from_numpy(gaussian(50_000)).to(torch.bfloat16)
    comm.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
    verdict(identical(x.view(torch.uint8).numpy()))
    verdict(relative_error(x.double().numpy(), total(50_000)) < 0.6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", [MPI.SUM, "avg"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_missing_from_the_sum_is_what_the_ranks_keep(make, small_chunks, form, op, algorithm):
    comm = make(policy("topk:ratio=0.1", form))
    n, steps = 20_011, 8
    share = P if op == "avg" else 1
    missing = np.zeros(n)
    for step in range(steps):
        got = np.empty(n, np.float32)
        comm.Allreduce(gaussian(n, seed=step), got, op, name="weight", algorithm=algorithm)
        verdict(identical(got))
        missing += total(n, seed=step) - got.astype(np.float64) * share
    memory = comm.feedback.memory(("dp", "weight"), n, form=form)
    mine = memory.error if hasattr(memory, "error") else memory.arrays()[""]
    verdict((np.count_nonzero(mine) > 0) == (P > 1))
    kept = np.asarray(WORLD.allreduce(mine.astype(np.float64), op=MPI.SUM))
    if form == "loco":  # and what 8 bits round off
        verdict(relative_error(kept / (1 - 0.8), missing) < 0.05)
    else:
        verdict(float(np.abs(kept - missing).max()) < 2e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_feedback_where_the_elements_crowd(make, small_chunks, algorithm):
    """The owners change from step to step: what they keep of the sum is sent nevertheless."""
    comm = make(policy("threshold:abs=2", "ef"))
    n, missing = 60_000, np.zeros(60_000)
    for step in range(6):
        scale = np.where(np.arange(n) // 10_000 == step, 2.0, 0.1)
        got = (gaussian(n, seed=step) * scale).astype(np.float32)
        comm.Allreduce(MPI.IN_PLACE, got, name="weight", algorithm=algorithm)
        verdict(identical(got))
        meant = [(gaussian(n, r, step) * scale).astype(np.float32).astype(np.float64) for r in range(P)]
        missing += np.sum(meant, axis=0) - got
    mine = comm.feedback.memory(("dp", "weight"), n, form="ef").error
    kept = np.asarray(WORLD.allreduce(mine.astype(np.float64), op=MPI.SUM))
    verdict(float(np.abs(kept - missing).max()) < 2e-4)


def test_balanced_parts_share_the_bytes_where_the_elements_crowd(make):
    n = 400_000
    x = gaussian(n)
    x[n // 8 :] *= 1e-3
    most = {}
    for algorithm in ("direct", "oktopk"):
        comm = make("threshold:abs=0.5")
        got = np.empty(n, np.float32)
        comm.Allreduce(x, got, algorithm=algorithm)
        most[algorithm] = max(WORLD.allgather(comm.stats()[0].wire_bytes))
    verdict(most["oktopk"] <= {1: 1, 2: 1.01}.get(P, 0.8) * most["direct"], f"{most}")


def test_regions_are_cut_where_the_weight_is():
    assert balanced([1, 1, 1, 1], 2) == [[0, 1], [2, 3]]
    assert balanced([8, 1, 1, 1, 1, 1, 1, 2], 2) == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert balanced([1, 100, 1], 3) == [[0], [1], [2]]
    assert balanced([], 3) == [[], [], []]
    for weights in ([5] * 100, list(range(1, 101)), [1] * 50 + [1000] * 3 + [1] * 47):
        runs = balanced(weights, P)
        assert [k for run in runs for k in run] == list(range(len(weights)))
        assert max(sum(weights[k] for k in run) for run in runs) <= sum(weights) / P + max(weights)


def test_who_is_chosen():
    chooser = choosing.Chooser(Topology((0, 1, 2, 3)), BUILT_IN, {})

    def chosen(codec: str, feedback: str | None = None) -> str:
        float32 = hc.arrays.DType.FLOAT32
        return chooser.choose("all_reduce", 1 << 20, float32, hc.get_codec(codec), feedback).algorithm.name

    assert chosen("topk:ratio=0.001") == chosen("sidco:ratio=0.001", "dgc") == "sparse"
    assert chosen("topk:ratio=0.001", "ef21") == chosen("topk:ratio=0.5") == chosen("int8", "ef") == "direct"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_cannot_be_is_refused(make, algorithm):
    chooser = make().session._chooser
    for codec, form, why in (
        ("int8", "ef", "int8 is not a sparse codec; allowed: "),
        ("topk:ratio=0.1", "ef21", "no error feedback of the form ef21; allowed: "),
    ):
        with pytest.raises(ValueError, match=why):
            chooser.choose(
                "all_reduce", 40, hc.arrays.DType.FLOAT32, hc.get_codec(codec), form, requested=algorithm
            )
    comm = make("int8")
    refused = False
    try:
        comm.Allreduce(np.ones(10, np.float32), np.ones(10, np.float32), algorithm=algorithm)
    except ValueError:
        refused = True
    verdict(refused == (P > 1))  # one rank's sums are MPI's own


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overflow_is_seen_by_all(make, algorithm, bad):
    comm = make("topk:ratio=0.1")
    x = gaussian(10_000)
    if WORLD.rank == P - 1:
        x[4321] = bad
    comm.Allreduce(MPI.IN_PLACE, x, algorithm=algorithm)
    verdict(not np.isfinite(x[4321]) and identical(np.isfinite(x)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_codec_is_named(make, algorithm):
    comm = make("topk:ratio=0.1", timeout=10.0)
    x = gaussian(5000)
    mine = "topk:ratio=0.1" if WORLD.rank else "topk:ratio=0.2"
    caught = ""
    try:
        comm.Allreduce(MPI.IN_PLACE, x, codec=mine, algorithm=algorithm)
    except (hc.MismatchError, hc.RemoteError) as error:  # its own finding, or that of a rank which was first
        caught = str(error)
    if P == 1:
        assert not caught
    else:
        own = "topk:ratio=0.2" if WORLD.rank == 0 else "rank 0 sent"
        verdict(own in caught or " failed: MismatchError: " in caught, caught)


@pytest.mark.ranks(most=4)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_device_gives_the_host_paths_bits(make, small_chunks, way, algorithm, dtype):
    comm = make("topk:ratio=0.05")
    n = 20_003
    storage = values(n, dtype)
    device, host = to_device(storage, hc.arrays.as_dtype(dtype)), host_array(storage.copy(), dtype)
    comm.Allreduce(MPI.IN_PLACE, device, "avg", algorithm=algorithm)
    comm.Allreduce(MPI.IN_PLACE, host, "avg", algorithm=algorithm)
    agrees(device, host)
