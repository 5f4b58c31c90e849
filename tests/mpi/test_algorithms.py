"""Every algorithm of every operation: the same bits on all ranks, near the exact result, and those of ``direct``."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.arrays import as_dtype, flatten
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.engine.programs import Programs
from hybridcomp.collectives.operations import flat_reductions
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.policy.toml import parse_policy
from tests.cuda.common import host_array
from tests.mpi import conftest
from tests.mpi.conftest import WORLD, communicator, relative_error, verdict

P, me = WORLD.size, WORLD.rank
SIZES = [0, 1, 2, P - 1, 63, 1000, 20_011]
LARGE = [70_001, 300_000]
BLOCKS = [0, 1, 3, 1000, 20_001]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
CHUNK_BYTES = 16_000
# Relative L2 error of one encoding of each rank's part and one of the sum, on Gaussian data.
CODECS = {"mpc": 1e-6, "int8:block=128": 0.012, "int4:block=128": 0.22, "topk:ratio=0.5": 0.6}
CODECS["threshold:rel=0.3"] = 0.25
ROUNDING = {"float32": 1e-6, "float64": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
# Partial sums that are encoded again add to that.
AGAIN = 1.0 + 0.25 * P.bit_length()
MANY = [(codec, "float32") for codec in CODECS]
MANY += [(codec, dtype) for codec in ("mpc", "int8:block=128") for dtype in DTYPES[1:]]

gaussian = functools.lru_cache(maxsize=64)(conftest.gaussian)


@functools.lru_cache(maxsize=64)
def total(n: int, dtype: str) -> np.ndarray:
    """Return the sum over all ranks of what :func:`values` gives them."""
    return np.sum([numbers(values(n, dtype, r)) for r in range(P)], axis=0) if n else np.zeros(0)


def values(n: int, dtype: str, rank: int = me) -> Any:
    """Return a rank's values."""
    x = gaussian(n, rank)
    if dtype == "bfloat16":
        return host_array((x.view(np.uint32) >> 16).astype(np.uint16), dtype)
    return x.astype(dtype)


def copied(n: int, dtype: str) -> Any:
    """Return this rank's values, to be overwritten."""
    return host_array(storage(values(n, dtype)).copy(), dtype)


def empty(n: int, dtype: str) -> Any:
    """Return a buffer full of something else."""
    return host_array(np.full(n, 7, as_dtype(dtype).storage), dtype)


def storage(x: Any) -> np.ndarray:
    return np.asarray(flatten(x).data)


def numbers(x: Any) -> np.ndarray:
    """Return values in float64."""
    raw = storage(x)
    if flatten(x).dtype is hc.arrays.DType.BFLOAT16:
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.astype(np.float64)


def near(got: Any, want: np.ndarray, codec: str, dtype: str, factor: float = 1.0) -> bool:
    """Whether the error is one that the codec makes; few values may nearly cancel in their sum."""
    bound = factor * CODECS[codec] + ROUNDING[dtype]
    return relative_error(numbers(got), want) <= bound * (1 if want.size > 60 else 20)


def sizes(codec: str, dtype: str) -> list[int]:
    """Return sizes of buffers to try."""
    if dtype != "float32":
        return [1, 1000, 20_011]
    return SIZES + LARGE if codec.startswith("int8") else SIZES


class Checks:
    """Failures, told on all ranks together at the end: each question to all ranks costs more than what is tested."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.results: list[tuple[str, bytes]] = []

    def __call__(self, ok: bool, what: str) -> None:
        if not ok:
            self.wrong.append(what)

    def same(self, result: Any, what: str) -> None:
        """Note a result of which all ranks must have the same bits."""
        self.results.append((what, hashlib.sha1(storage(result).tobytes()).digest()))

    def end(self) -> None:
        for rank, theirs in enumerate(WORLD.allgather(self.results)):
            pairs = zip(self.results, theirs, strict=True)
            self.wrong += [f"{mine[0]}: other bits on rank {rank}" for mine, other in pairs if mine != other]
        verdict(not self.wrong, f"{self.wrong[:5]} and more: {len(self.wrong)} in all")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    """Yield checks, with chunks so small that there are many."""
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: CHUNK_BYTES)
    checks = Checks()
    yield checks
    checks.end()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return peer, tag and bytes of every message that a collective sends, descriptors of messages as such."""
    log: list[tuple[int, int, int]] = []
    isend = MpiTransport.isend

    def logged(self: MpiTransport, data: Any, peer: int, tag: int) -> MPI.Request:
        log.append((peer, tag, len(data)))
        return isend(self, data, peer, tag)

    monkeypatch.setattr(MpiTransport, "isend", logged)
    # Messages of the compiled engine are not seen here; its schedules are verified by themselves.
    monkeypatch.setattr(Programs, "find", lambda *_, **__: None)
    return log


@pytest.fixture(scope="module")
def comm() -> Iterator[hc.Communicator]:
    """Make one for all tests that leave nothing behind."""
    made = hc.Communicator(WORLD, "none", "dp", timeout=30.0)
    yield made
    made.Free()


def doomed(timeout: float) -> hc.Communicator:
    """Make one that is never freed: messages that nobody takes would come to whichever gets its place."""
    return communicator(timeout=timeout)


def reduce(
    comm: hc.Communicator, send: Any, recv: Any, op: Any, root: int, codec: str, algorithm: str
) -> None:
    """Reduce to a root by a codec."""
    out = None if recv is None else flatten(recv, writable=True)
    options = OperationOptions(codec=codec, algorithm=algorithm)
    flat_reductions.reduce(comm.session, flatten(send), out, op, root, options).wait()


@pytest.mark.parametrize(("codec", "dtype"), MANY)
@pytest.mark.parametrize("algorithm", ["ring", "halving"])
def test_all_reduce(comm, check, algorithm, codec, dtype):
    factor = AGAIN if algorithm == "halving" else 1.0
    for n in sizes(codec, dtype):
        got, mean = empty(n, dtype), copied(n, dtype)
        comm.Allreduce(values(n, dtype), got, algorithm=algorithm, codec=codec)
        comm.Allreduce(MPI.IN_PLACE, mean, "avg", algorithm=algorithm, codec=codec)
        check.same(got, f"{n}")
        check.same(mean, f"mean of {n}")
        check(near(got, total(n, dtype), codec, dtype, factor), f"far: {n}")
        check(near(mean, total(n, dtype) / P, codec, dtype, factor), f"mean far: {n}")
        if algorithm == "ring":
            want = empty(n, dtype)
            comm.Allreduce(values(n, dtype), want, codec=codec, algorithm="direct")
            check(storage(got).tobytes() == storage(want).tobytes(), f"not as direct: {n}")


@pytest.mark.parametrize(("codec", "dtype"), MANY)
@pytest.mark.parametrize("algorithm", ["ring", "halving"])
def test_reduce_scatter(comm, check, algorithm, codec, dtype):
    factor = AGAIN if algorithm == "halving" else 1.0
    for n in BLOCKS if dtype == "float32" else (3, 20_001):
        send, got = values(n * P, dtype), empty(n, dtype)
        comm.Reduce_scatter_block(send, got, algorithm=algorithm, codec=codec)
        block = total(n * P, dtype)[n * me : n * (me + 1)]
        check(near(got, block, codec, dtype, factor), f"far: {n}")
        mean, want = copied(n * P, dtype), empty(n, dtype)
        comm.Reduce_scatter_block(MPI.IN_PLACE, mean, "avg", algorithm=algorithm, codec=codec)
        check(near(mean[:n], block / P, codec, dtype, factor), f"mean far: {n}")
        if algorithm == "ring":
            comm.Reduce_scatter_block(send, want, codec=codec, algorithm="direct")
            check(storage(got).tobytes() == storage(want).tobytes(), f"not as direct: {n}")


@pytest.mark.parametrize(("codec", "dtype"), MANY)
@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_all_gather(comm, check, algorithm, codec, dtype):
    for n in BLOCKS if dtype == "float32" else (3, 20_001):
        got, want = empty(n * P, dtype), empty(n * P, dtype)
        comm.Allgather(values(n, dtype), got, algorithm=algorithm, codec=codec)
        comm.Allgather(values(n, dtype), want, codec=codec, algorithm="direct")
        check.same(got, f"{n}")
        check(storage(got).tobytes() == storage(want).tobytes(), f"not as direct: {n}")
        want[n * me : n * (me + 1)] = values(n, dtype)
        comm.Allgather(MPI.IN_PLACE, want, algorithm=algorithm, codec=codec)
        check(storage(got).tobytes() == storage(want).tobytes(), f"not in place: {n}")


@pytest.mark.parametrize(("codec", "dtype"), MANY)
@pytest.mark.parametrize("algorithm", ["direct", "scatter"])
def test_broadcast(comm, check, algorithm, codec, dtype):
    for n in sizes(codec, dtype):
        root = n % P
        got, want = (copied(n, dtype) if me == root else empty(n, dtype) for _ in range(2))
        comm.Bcast(got, root, algorithm=algorithm, codec=codec)
        check.same(got, f"{n}")
        check(near(got, numbers(values(n, dtype, root)), codec, dtype), f"far: {n}")
        if algorithm == "direct":
            comm.Bcast(want, root, codec=codec, algorithm="tree")
            check(storage(got).tobytes() == storage(want).tobytes(), f"not as the tree: {n}")


@pytest.mark.parametrize(("codec", "dtype"), MANY)
@pytest.mark.parametrize("algorithm", ["direct", "tree"])
def test_reduce(comm, check, algorithm, codec, dtype):
    factor = AGAIN if algorithm == "tree" else 1.0
    for n in sizes(codec, dtype):
        root = (n + 1) % P
        send, got, mean = values(n, dtype), empty(n, dtype), copied(n, dtype)
        reduce(comm, send, got if me == root else None, MPI.SUM, root, codec, algorithm)
        reduce(comm, mean, mean if me == root else None, "avg", root, codec, algorithm)
        if me == root:
            check(near(got, total(n, dtype), codec, dtype, factor), f"far: {n}")
            check(near(mean, total(n, dtype) / P, codec, dtype, factor), f"mean far: {n}")
        else:
            check(storage(send).tobytes() == storage(values(n, dtype)).tobytes(), f"data changed: {n}")
            check(storage(mean).tobytes() == storage(send).tobytes(), f"data changed elsewhere: {n}")


def test_reduce_to_a_root_without_room():
    if P == 1:
        return
    comm = doomed(timeout=0.3)
    x, error = np.ones(100, np.float32), None
    try:
        reduce(comm, x, x[:99], MPI.SUM, P - 1, "int8", "tree")
    except (ValueError, hc.CollectiveTimeoutError, hc.RemoteError) as caught:
        error = caught
    verdict(me != P - 1 or "needs as much room at the root, not 99 float32" in str(error))


@pytest.mark.parametrize("algorithm", ["ring", "halving"])
def test_large_half_sums_that_nobody_compresses(comm, check, algorithm):
    """Large sums are carried by the codec ``none``: partial sums in float32, the result rounded once."""
    for dtype in ("float16", "bfloat16"):
        n = 70_001
        got, want = empty(n, dtype), empty(n, dtype)
        comm.Allreduce(values(n, dtype), got, algorithm=algorithm)
        comm.Allreduce(values(n, dtype), want, algorithm="direct")
        check(relative_error(numbers(got), numbers(want)) < 1e-5, dtype)


@pytest.mark.parametrize(("algorithm", "bad"), [("ring", np.inf), ("halving", np.nan)])
def test_overflow_is_seen_by_all(comm, check, algorithm, bad):
    for codec in CODECS:
        x = gaussian(10_000).copy()
        if me == P - 1:
            x[4321] = bad
        comm.Allreduce(MPI.IN_PLACE, x, codec=codec, algorithm=algorithm)
        check(not np.isfinite(x[4321]), codec)
        check.same(np.isfinite(x), codec)


# -- error feedback ----------------------------------------------------------------------------------


def policy(op: str, codec: str, form: str) -> hc.Policy:
    return parse_policy(f'[dp]\n{op} = {{ codec = "{codec}", feedback = "{form}" }}\n', "test")


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("ef", "int4"),
        ("ef", "topk:ratio=0.1"),
        ("loco", "int4"),
        ("dgc", "topk:ratio=0.1"),
        ("ef21", "int4"),
        ("ef-sgdm", "int4"),
    ],
)
def test_a_ring_with_feedback_gives_the_bits_of_direct(make, check, form, codec):
    for op in ("all_reduce", "reduce_scatter") if form != "ef21" else ("all_reduce",):
        comm, other = (make(policy(op, codec, form)) for _ in range(2))
        n = 9_088 * P  # several chunks of whole blocks of loco's state
        for step in range(2):
            x = conftest.gaussian(n, seed=step)
            got, want = (np.empty(n if op == "all_reduce" else n // P, np.float32) for _ in range(2))
            if op == "all_reduce":
                comm.Allreduce(x, got, "avg", name="w", algorithm="ring")
                other.Allreduce(x, want, "avg", name="w", algorithm="direct")
                check.same(got, f"step {step}")
            else:
                comm.Reduce_scatter_block(x, got, "avg", name="w", algorithm="ring")
                other.Reduce_scatter_block(x, want, "avg", name="w", algorithm="direct")
            check(got.tobytes() == want.tobytes(), f"{op}: not as direct, step {step}")


def test_what_has_no_feedback_says_so(make):
    if P == 1:
        return
    comm = make(policy("all_reduce", "int8", "ef"))
    with pytest.raises(ValueError, match="cannot use algorithm 'halving' here: it has no error feedback"):
        comm.Allreduce(MPI.IN_PLACE, np.ones(100, np.float32), name="w", algorithm="halving")
    comm.Allreduce(
        MPI.IN_PLACE, np.ones(100, np.float32), algorithm="halving"
    )  # without a name there is none


# -- who sends what to whom --------------------------------------------------------------------------


def test_a_rings_results_go_to_the_next_rank_alone(comm, check, sent):
    if P == 1:
        return
    comm.Allreduce(MPI.IN_PLACE, gaussian(70_001).copy(), codec="int8", algorithm="ring")
    parts = min(tag for _, tag, _ in sent)
    check({peer for peer, tag, _ in sent if tag > parts} == {(me + 1) % P}, f"{sent}")
    peers = [peer for peer, tag, _ in sent if tag == parts]
    rounds = [(me + i) % P for i in range(1, P)]
    check(peers == rounds * (len(peers) // (P - 1)), f"parts not in rounds: {peers}")


def test_halving_sends_few_messages(comm, check, sent):
    if P == 1:
        return
    comm.Allreduce(MPI.IN_PLACE, gaussian(1000).copy(), codec="int8", algorithm="halving")
    places = 1 << (P.bit_length() - 1)
    halvings = places.bit_length() - 1
    folded = me < 2 * (P - places) and me % 2
    follower = me < 2 * (P - places) and not me % 2
    # partial sums; then as many results as all-gather takes, and all of them to a rank that has folded
    most = 1 if folded else halvings + (places - 1) + places * bool(follower)
    check(len(sent) == most, f"{len(sent)} messages, not {most}")


def test_a_scattered_broadcast_sends_everything_once(make, check):
    if P < 3:
        return
    comm = make("int8")
    comm.Bcast(gaussian(300_000).copy(), 0, algorithm="scatter")
    (row,) = comm.stats()
    whole = 300_000 * (1 + 4 / 128)
    share = 1.0 if me == 0 else (P - 2) / (P - 1)
    check(abs(row.wire_bytes / whole - share) < 0.02, f"{row.wire_bytes} of {whole}")


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [("all_reduce", "ring"), ("all_reduce", "halving"), ("all_gather", "doubling"), ("broadcast", "scatter")],
)
def test_another_codec_elsewhere_is_named(op, algorithm):
    if P == 1:
        return
    comm = doomed(timeout=0.5)
    codec = "int8:block=64" if me == 0 else "int8:block=128"
    x, every = gaussian(5000).copy(), np.empty(5000 * P, np.float32)
    error: Exception | None = None
    try:
        if op == "all_reduce":
            comm.Allreduce(MPI.IN_PLACE, x, codec=codec, algorithm=algorithm)
        elif op == "all_gather":
            comm.Allgather(x, every, codec=codec, algorithm=algorithm)
        else:
            comm.Bcast(x, 0, codec=codec, algorithm=algorithm)
    except (hc.MismatchError, hc.RemoteError, hc.CollectiveTimeoutError) as caught:
        error = caught
    found = isinstance(error, hc.MismatchError)
    verdict(not found or ("int8:block" in str(error) and "rank 0" in str(error)), str(error))
    verdict(WORLD.allreduce(int(found)) > 0)
