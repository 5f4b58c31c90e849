"""The compiled engine: the bits of Python's run, many operations at once, from several threads, and full rings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.arrays import DType, Flat
from hybridcomp.collectives.agreement import making
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.engine.groups import native_engine
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.collectives.operations.flat_reductions import allreduce
from hybridcomp.policy import Choice
from hybridcomp.policy.toml import parse_policy
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.topology import Topology
from hybridcomp.variables import SHARED_MEMORY
from tests.mpi.conftest import WORLD, communicator, gaussian, identical, step_by_step, total, verdict

CODECS = ["int8", "int4:rounding=stochastic", "bf16", "exponent", "topk:ratio=0.1", "sign", "zfp:rate=8"]
# Codecs whose steps Python computes.
CODECS += ["lossless", "mpc", "topk:ratio=0.1,values=int8"]
FORMS = ["ef", "loco", "dgc", "ef21", "ef-sgdm"]


@pytest.fixture(params=["one host", "two hosts"])
def both(request, monkeypatch) -> Iterator[tuple[hc.Communicator, hc.Communicator, Topology]]:
    """A communicator of the engine's, and one whose operations run in Python; chunks are small."""
    hosts = tuple(r * 2 // WORLD.size if request.param == "two hosts" else 0 for r in range(WORLD.size))
    topology = Topology(hosts)
    monkeypatch.setattr(making, "discover", lambda comm, node: topology)
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 4096)
    policy = "[dp]\nall_reduce = { codec = 'int8', feedback = '%s' }\n"
    made = [communicator(parse_policy(policy % "ef", "test")) for _ in range(2)]
    step_by_step(made[1])
    yield made[0], made[1], topology
    for comm in made:
        comm.Free()


def algorithms(topology: Topology, codec: str, op: str = "all_reduce") -> list[str]:
    by = hc.get_codec(codec)
    return [a.name for a in ALGORITHMS[op].values() if refusal(a, topology, by) is None]


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_as_in_python(both, codec):
    compiled, generated, topology = both
    wrong = []
    for n in (1, 130, 10_001):
        for dtype in ("float32", "float64", "float16"):
            for algorithm in algorithms(topology, codec):
                x = gaussian(n, dtype=dtype)
                got, want = np.empty_like(x), np.empty_like(x)
                compiled.Allreduce(x, got, codec=codec, algorithm=algorithm)
                generated.Allreduce(x, want, codec=codec, algorithm=algorithm)
                if got.tobytes() != want.tobytes():
                    wrong.append((n, dtype, algorithm))
    verdict(not wrong, str(wrong))


def counts_of(scale: int) -> list[int]:
    """Return the sizes of a part for each rank, which differ; some are empty."""
    return [scale * ((r * 3 + 1) % 4) + (r % 2) for r in range(WORLD.size)]


def spread(counts: list[int], gap: int) -> list[int]:
    """Place parts that do not follow one another: return where each begins, the last one first, with gaps."""
    starts, at = [0] * len(counts), 3
    for r in reversed(range(len(counts))):
        starts[r], at = at, at + counts[r] + gap
    return starts


def moves(comm: hc.Communicator, codec: str, dtype: str, n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Run every operation but all-reduce, by every algorithm; yield its name and what it wrote."""
    p, rank, root = WORLD.size, WORLD.rank, WORLD.size - 1
    counts = counts_of(n)
    starts, total = spread(counts, 5), sum(counts)
    room = max(start + c for start, c in zip(starts, counts, strict=True)) + 7

    def out(size: int) -> np.ndarray:
        return np.full(size, 7, dtype)

    def able(op: str) -> list[str]:
        return list(algorithms(comm.session.topology, codec, op))

    block, whole = gaussian(n, dtype=dtype), gaussian(n * p, dtype=dtype)
    for op in (MPI.SUM, "avg"):
        for algorithm in able("reduce_scatter"):
            got = out(n)
            comm.Reduce_scatter_block(whole, got, op, codec=codec, algorithm=algorithm)
            yield f"reduce_scatter_block {op} {algorithm}", got
            got = whole.copy()
            comm.Reduce_scatter_block(MPI.IN_PLACE, got, op, codec=codec, algorithm=algorithm)
            yield f"reduce_scatter_block in place {op} {algorithm}", got
        got = out(counts[rank])
        comm.Reduce_scatter(gaussian(total, dtype=dtype), got, counts, op, codec=codec)
        yield f"reduce_scatter {op}", got
        for algorithm in able("reduce"):
            got = out(n)
            comm.Reduce(block, got, op, root, codec=codec, algorithm=algorithm)
            yield f"reduce {op} {algorithm}", got
    for algorithm in able("all_gather"):
        got = out(n * p)
        comm.Allgather(block, got, codec=codec, algorithm=algorithm)
        yield f"all_gather {algorithm}", got
        got[rank * n : (rank + 1) * n] = block
        comm.Allgather(MPI.IN_PLACE, got, codec=codec, algorithm=algorithm)
        yield f"all_gather in place {algorithm}", got
    for algorithm in able("broadcast"):
        got = gaussian(n, dtype=dtype)
        comm.Bcast(got, root, codec=codec, algorithm=algorithm)
        yield f"broadcast {algorithm}", got
    mine, parts = gaussian(counts[rank], dtype=dtype), gaussian(room, dtype=dtype)
    got = out(room)
    comm.Allgatherv(mine, [got, counts, starts], codec=codec)
    yield "all_gatherv", got
    got = out(n * p)
    comm.Gather(block, got if rank == root else None, root, codec=codec)
    yield "gather", got
    got = out(room)
    comm.Gatherv(mine, [got, counts, starts] if rank == root else None, root, codec=codec)
    yield "gatherv", got
    got = out(n)
    comm.Scatter(whole if rank == root else None, got, root, codec=codec)
    yield "scatter", got
    got = out(counts[rank])
    comm.Scatterv([parts, counts, starts] if rank == root else None, got, root, codec=codec)
    yield "scatterv", got
    got = out(n * p)
    comm.Alltoall(whole, got, codec=codec)
    yield "all_to_all", got
    outgoing = [(rank + q) % 3 * n // 2 for q in range(p)]
    got, displs = out(2 * n * p + 99), spread(outgoing, 9)  # rank q sends as many here as go there
    comm.Alltoallv(
        [gaussian(2 * n * p + 99, dtype=dtype), outgoing, displs], [got, outgoing, displs], codec=codec
    )
    yield "all_to_allv", got


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("codec", CODECS)
def test_other_operations_have_the_bits_of_python(both, codec):
    compiled, generated, _ = both
    wrong = []
    for n in (1, 1_300):
        for dtype in ("float32", "float64", "float16"):
            pairs = zip(moves(compiled, codec, dtype, n), moves(generated, codec, dtype, n), strict=True)
            wrong += [(name, n, dtype) for (name, got), (_, want) in pairs if got.tobytes() != want.tobytes()]
    verdict(not wrong, str(wrong))
    rows = zip(compiled.stats(), generated.stats(), strict=True)
    apart = [
        (a, b)
        for a, b in rows
        if a.calls != b.calls or abs(a.wire_bytes - b.wire_bytes) > 0.05 * b.wire_bytes
    ]
    verdict(not apart, str(apart))


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("form", FORMS)
def test_same_memories_as_in_python(both, form):
    *_, topology = both
    if WORLD.size == 1:
        return
    policy = parse_policy(
        f"min_bytes = 0\n[dp]\nall_reduce = {{ codec = 'int8', feedback = '{form}' }}\n", "test"
    )
    comms = [hc.Communicator(WORLD, policy, "dp", timeout=30.0) for _ in range(2)]
    step_by_step(comms[1])
    wrong = []
    for algorithm in algorithms(topology, "int8"):
        if refusal(ALGORITHMS["all_reduce"][algorithm], topology, hc.get_codec("int8"), form):
            continue
        for op in (MPI.SUM, "avg"):
            for step in range(4):
                x = gaussian(9_001, seed=step)
                if step == 2:
                    x[77] = np.inf
                got, want = np.empty_like(x), np.empty_like(x)
                for comm, out in zip(comms, (got, want), strict=True):
                    comm.Allreduce(x, out, op, name=f"{algorithm} {op == 'avg'}", algorithm=algorithm)
                if got.tobytes() != want.tobytes():
                    wrong.append((algorithm, op, step))
    states = [comm.feedback.state_dict() for comm in comms]
    wrong += [key for key, value in states[0].items() if value.tobytes() != states[1][key].tobytes()]
    verdict(not wrong, str(wrong))
    for comm in comms:
        comm.Free()


def test_uncompressed_sums_are_the_engines_and_alike(make):
    comm = make("none")
    for n in (1, 1000, 300_001):
        for dtype in ("float32", "float64", "float16"):
            for op in (MPI.SUM, "avg"):
                x = gaussian(n, dtype=dtype)
                comm.Allreduce(MPI.IN_PLACE, x, op)
                want = total(n, dtype=dtype) / (WORLD.size if op == "avg" else 1)
                close = np.allclose(
                    x.astype(np.float64), want, rtol=2e-3 if dtype == "float16" else 1e-5, atol=2e-2
                )
                verdict(identical(x) and close, f"{n} {dtype} {op}")


def test_sums_in_place_are_as_others_where_mpi_carries_them(make, monkeypatch):
    """Keep what is sent from the caller's array until it has left, and what this rank adds itself."""
    monkeypatch.setenv(SHARED_MEMORY.name, "0")
    comm = make("none")
    for algorithm in algorithms(Topology((0,) * WORLD.size), "none"):
        for codec in ("none", "lattice:bits=16"):
            choice = Choice(hc.get_codec(codec), None, "asked for", algorithm=algorithm)
            for n in (1, 1000, 300_001):
                x, y = gaussian(n), np.empty(n, np.float32)
                before = x.copy()
                flat, room = (Flat(data, DType.FLOAT32, data.shape, True, False) for data in (x, y))
                allreduce(comm.session, flat, room, AVG, OperationOptions(codec=choice)).wait()
                kept = x.tobytes() == before.tobytes()
                allreduce(comm.session, flat, flat, AVG, OperationOptions(codec=choice)).wait()
                verdict(kept and x.tobytes() == y.tobytes(), f"{n} by {codec} and {algorithm}")


def test_more_operations_than_a_ring_holds(make):
    """The last rank comes late: what the others send it fills its rings, and none of them may wait for ever."""
    comm = make("int8", timeout=60.0)
    count = 700
    arrays = [gaussian(40, seed=i) for i in range(count)]
    if WORLD.size > 1 and WORLD.rank == WORLD.size - 1:
        WORLD.recv(source=0, tag=9)
    started = [comm.Iallreduce(MPI.IN_PLACE, x) for x in arrays]
    if WORLD.rank == 0 and WORLD.size > 1:
        WORLD.send(None, dest=WORLD.size - 1, tag=9)
    for request in reversed(started):
        request.wait()
    verdict(identical(np.concatenate(arrays)))


def overlap(comms: list[hc.Communicator], sizes: list[int], steps: int, codecs: list[str | None]) -> None:
    """Run a random program on each communicator, in a thread each: the same on all ranks, blocking and not."""
    results: list[list[np.ndarray]] = [[] for _ in comms]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        rng = np.random.default_rng(i)
        flying = []
        try:
            for step in range(steps):
                x, codec = gaussian(int(rng.choice(sizes)), seed=step), codecs[rng.integers(len(codecs))]
                if rng.random() < 0.5:
                    comms[i].Allreduce(MPI.IN_PLACE, x, codec=codec)
                else:
                    flying.append(comms[i].Iallreduce(MPI.IN_PLACE, x, codec=codec))
                results[i].append(x)
                while flying and rng.random() < 0.4:
                    flying.pop(int(rng.integers(len(flying)))).wait()
            for request in flying:
                request.wait()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(i,)) for i in range(len(comms))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    verdict(not errors, repr(errors))
    for mine in results:
        verdict(identical(np.concatenate(mine)))


def test_threads_that_overlap_on_communicators_of_their_own(make):
    comms = [make(codec) for codec in ("int8", "none", "int4")]
    overlap(comms, [1, 100, 5_000, 70_000, 400_000], 60, [None])


def test_statistics_count_what_the_engine_sent(make):
    comm = make("int8")
    x = gaussian(100_000)
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, x)
    comm.Iallreduce(MPI.IN_PLACE, x).wait()
    (row,) = comm.stats()
    assert (row.calls, row.raw_bytes) == (4, 1_600_000)
    if WORLD.size > 1:
        assert row.wire_bytes > 0
        assert row.encode_seconds > 0
        assert row.decode_seconds > 0


def test_memory_of_messages_is_used_again(make):
    comm = make("int8")
    x = gaussian(300_000)
    for _ in range(5):
        comm.Allreduce(MPI.IN_PLACE, x)
    WORLD.Barrier()
    before = native_engine().engine_used_bytes() if WORLD.size > 1 else 0
    for _ in range(50):
        x[:] = gaussian(300_000)
        comm.Allreduce(MPI.IN_PLACE, x)
    after = native_engine().engine_used_bytes() if WORLD.size > 1 else 0
    verdict(after - before < 8 << 20, f"{before} to {after}")


def test_an_operation_that_nobody_waits_for_ends(make):
    """The engine's own thread makes progress, and calls back."""
    comm = make("int8")
    ended = threading.Event()
    x = gaussian(200_000)
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    request.add_done_callback(lambda _: ended.set())
    verdict(ended.wait(20))
    request.wait()
    verdict(identical(x))


def test_a_sender_waits_for_late_readers(make):
    """A root hands over no more than so much in shared memory, which stays there until it is read."""
    comm = make("none", timeout=60.0)
    x = gaussian(2_000_000)
    comm.Bcast(x, 0, codec="int8")
    WORLD.Barrier()
    before = native_engine().engine_used_bytes() if WORLD.size > 1 else 0
    if WORLD.rank:
        time.sleep(0.5)
    for _ in range(60):  # 120 MB of messages
        comm.Bcast(x, 0, codec="int8")
    used = (native_engine().engine_used_bytes() if WORLD.size > 1 else 0) - before
    verdict(used <= 100 << 20, f"{used} bytes")
    verdict(identical(x))


def test_a_sender_whose_readers_stay_away_says_so(make):
    if WORLD.size == 1:
        return
    comm = make("none", timeout=1.0)
    x = gaussian(2_000_000)
    ended = 0
    if WORLD.rank == 0:
        error: BaseException | None = None
        while error is None and ended < 100:
            try:
                comm.Bcast(x, 0, codec="int8")
                ended += 1
            except hc.CollectiveTimeoutError as late:
                error = late
        notes = "\n".join(getattr(error, "__notes__", ()))
        verdict("still waiting for rank 1" in str(error) and 20 < ended < 80, f"{ended}: {error}")
        verdict("(rank 1, channel 0) waits: the message is not read (readers: " in notes, notes)
    else:
        verdict(True)
        verdict(True)
    ended = WORLD.bcast(ended, root=0)
    late = ""
    for _ in range(ended + 1 if WORLD.rank else 0):
        try:
            comm.Bcast(x, 0, codec="int8")  # what was lent is still there
        except hc.HybridcompError as error:  # unless it has heard of it first
            late = str(error)
            break
    want = WORLD.bcast(x.tobytes(), root=0)
    verdict("rank 0" in late if late else x.tobytes() == want, late)
