"""Steps that Python computes for the compiled engine: the threads that do them, and steps that fail or wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp import trace
from hybridcomp.codecs.lossless import LosslessCodec
from hybridcomp.collectives.agreement import making
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.collectives.engine.groups import native_engine
from hybridcomp.collectives.engine.python_steps import PythonSteps
from hybridcomp.policy.toml import parse_policy
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.topology import Topology
from hybridcomp.variables import SHARED_MEMORY
from tests.mpi.conftest import WORLD, communicator, gaussian, identical, step_by_step, verdict
from tests.mpi.engine.test_compiled import overlap
from tests.mpi.failure.test_interrupts import interrupt_often

# Whether Python computes a step as the engine does depends little on the number of ranks.
pytestmark = pytest.mark.ranks(least=3, most=3)
N = 200_000
P = WORLD.size


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the threads that compute steps, a name for each step."""
    names: list[str] = []
    honest = PythonSteps._compute

    def compute(self: PythonSteps, *args: Any) -> int:
        names.append(threading.current_thread().name)
        return honest(self, *args)

    monkeypatch.setattr(PythonSteps, "_compute", compute)
    return names


@pytest.fixture(params=["one host", "two hosts"])
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """A layout of the ranks, for the communicators that are made; chunks are small."""
    topology = Topology(tuple(r * 2 // P if request.param == "two hosts" else 0 for r in range(P)))
    monkeypatch.setattr(making, "discover", lambda comm, node: topology)
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 4096)
    return topology


def test_python_computes_what_needs_it_and_no_more(make, counted):
    comm = make("none")
    for codec, dtype, wanted in (
        ("lossless", "float32", True),
        ("mpc", "float64", False),
        ("topk:ratio=0.1,values=int8", "float32", True),
        ("topk:ratio=0.1", "float16", True),
        ("topk:ratio=0.1", "float32", False),
        ("int8", "float16", False),
    ):
        counted.clear()
        comm.Allreduce(MPI.IN_PLACE, gaussian(1000, dtype=dtype), codec=codec)
        verdict(bool(counted) is wanted, f"{codec} {dtype}: {counted}")
    counted.clear()
    comm.Allgather(gaussian(10, dtype="float16"), np.empty(10 * P, "float16"), codec="topk:ratio=0.1")
    verdict(not counted, "nothing is widened in an all-gather")


def test_sums_in_one_exchange_are_in_the_order_of_ranks(make):
    comm = make("none")
    for codec in ("lossless", "mpc", "topk:ratio=0.1,values=int8"):
        for dtype in ("float32", "float16"):
            x = gaussian(3_000, dtype=dtype)
            comm.Allreduce(MPI.IN_PLACE, x, "avg", codec=codec, algorithm="one_shot")
            want = np.zeros(x.size, np.float32)
            for rank in range(P):
                hc.decode_add(hc.get_codec(codec).encode(gaussian(x.size, rank, dtype=dtype)), want)
            verdict(x.tobytes() == (want / np.float32(P)).astype(dtype).tobytes(), f"{codec} {dtype}")


# The first has an encoder for each step, the second none; the third is the same at all steps.
CODECS = [
    "int8:rounding=stochastic",
    "topk:ratio=0.1,values=(int8:rounding=stochastic)",
    "topk:ratio=0.1",
]


@pytest.mark.parametrize("form", ["ef", "loco", "dgc", "ef21", "ef-sgdm"])
@pytest.mark.parametrize("codec", CODECS)
def test_same_memories_as_in_python(hosts, counted, codec, form):
    dtype = "float32" if codec == CODECS[0] else "float16"
    rule = f"{{ codec = '{codec}', feedback = '{form}' }}"
    lines = ["min_bytes = 0", "[dp]", f"all_reduce = {rule}"]
    if form != "ef21":
        lines.append(f"reduce_scatter = {rule}")
    comms = [communicator(parse_policy("\n".join(lines), "test")) for _ in range(2)]
    step_by_step(comms[1])
    wrong = []
    for op in ("all_reduce", "reduce_scatter"):
        for algorithm in ALGORITHMS[op].values():
            if refusal(algorithm, hosts, hc.get_codec(codec), form):
                continue
            if form == "ef21" and op == "reduce_scatter":
                continue
            for reduction in (MPI.SUM, "avg"):
                for step in range(4):
                    x = gaussian(9_000 * P, seed=step, dtype=dtype)
                    if step == 2:
                        x[77] = np.inf
                    outs = [np.empty(x.size if op == "all_reduce" else 9_000, dtype) for _ in range(2)]
                    for comm, out in zip(comms, outs, strict=True):
                        call = comm.Allreduce if op == "all_reduce" else comm.Reduce_scatter_block
                        name = f"{op} {algorithm.name} {reduction == 'avg'}"
                        call(x, out, reduction, name=name, algorithm=algorithm.name)
                    if outs[0].tobytes() != outs[1].tobytes():
                        wrong.append((op, algorithm.name, reduction == "avg", step))
    states = [comm.feedback.state_dict() for comm in comms]
    wrong += [key for key, value in states[0].items() if value.tobytes() != states[1][key].tobytes()]
    verdict(not wrong, str(wrong))
    verdict(bool(counted) is (codec != CODECS[0]))
    for comm in comms:
        comm.Free()


class Broken(Exception):
    pass


def failing(
    monkeypatch: pytest.MonkeyPatch, method: str, rank: int, error: BaseException, after: int = 2
) -> Callable[[], None]:
    """Let a method of the codec fail on a rank after some calls; return what ends that."""
    honest = getattr(LosslessCodec, method)
    left = [after]

    def fails(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return honest.__func__(LosslessCodec, *args) if hasattr(honest, "__func__") else honest(*args)

    if WORLD.rank == rank:
        wrapped: Any = classmethod(lambda _, *args: fails(*args)) if "decode" in method else fails
        monkeypatch.setattr(LosslessCodec, method, wrapped)
    return monkeypatch.undo


@pytest.mark.parametrize("method", ["encode_flat", "decode_flat", "decode_add_flat"])
@pytest.mark.parametrize("nobody_waits", [False, True])
def test_what_a_codec_raises_fails_its_operation_everywhere(make, monkeypatch, method, nobody_waits):
    comm = make("lossless", timeout=20.0)
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 1 << 16)
    comm.Allreduce(MPI.IN_PLACE, gaussian(N), codec="int8")
    broken = Broken("in the middle")
    undo = failing(monkeypatch, method, P - 1, broken)
    began = time.monotonic()
    request = comm.Iallreduce(MPI.IN_PLACE, gaussian(N), algorithm="direct")
    beside = comm.Iallreduce(MPI.IN_PLACE, x := gaussian(N, seed=2), codec="int8")
    if nobody_waits:
        ended = threading.Event()
        request.add_done_callback(lambda _: ended.set())
        verdict(ended.wait(10))
    error: BaseException | None = None
    try:
        request.wait()
    except (hc.HybridcompError, Broken) as caught:
        error = caught
    took = time.monotonic() - began
    if WORLD.rank == P - 1:
        verdict(error is broken, repr(error))
    else:
        good = isinstance(error, hc.RemoteError) and f"rank {P - 1} failed: Broken: in the middle" in str(
            error
        )
        verdict(good, repr(error))
    verdict(took < 10, f"{took}")
    beside.wait()
    verdict(identical(x))
    undo()
    y = gaussian(N, seed=3)
    comm.Allreduce(MPI.IN_PLACE, y)
    verdict(identical(y))


def test_what_is_thrown_into_a_step_reaches_its_thread(make, monkeypatch):
    comm = make("lossless", timeout=20.0)
    undo = failing(monkeypatch, "encode_flat", 0, KeyboardInterrupt(), after=0)
    x = gaussian(N)
    with pytest.raises(KeyboardInterrupt if WORLD.rank == 0 else hc.RemoteError) as caught:
        comm.Iallreduce(MPI.IN_PLACE, x).wait()
    verdict(WORLD.rank == 0 or "rank 0 failed: HybridcompError" in str(caught.value), str(caught.value))
    undo()
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x))


def test_an_interrupt_between_question_and_answer_leaves_nothing_in_flight(make, monkeypatch):
    comm = make("lossless", timeout=20.0)
    honest = PythonSteps.poll
    runs: list[Any] = []

    def poll(self: PythonSteps) -> bool:
        if not runs:
            runs.append(self._run)
            native_engine().engine_take(self._run)
            raise KeyboardInterrupt
        return honest(self)

    if WORLD.rank == 0:
        monkeypatch.setattr(PythonSteps, "poll", poll)
    with pytest.raises(KeyboardInterrupt if WORLD.rank == 0 else hc.RemoteError):
        comm.Iallreduce(MPI.IN_PLACE, gaussian(N)).wait()
    verdict(WORLD.rank != 0 or runs[0].done())
    x = gaussian(N)
    comm.Allreduce(MPI.IN_PLACE, x)
    verdict(identical(x))


@pytest.mark.parametrize("abandoned", [False, True])
def test_what_a_codec_was_lent_stays_for_as_long_as_it_is_referred_to(make, monkeypatch, abandoned):
    """The engine may also end an operation while its step runs."""
    comm = make("lossless", timeout=20.0)
    kept: list[np.ndarray] = []
    runs: list[Any] = []
    encode, compute = LosslessCodec.encode_flat, PythonSteps._compute

    def spy(self: PythonSteps, *args: Any) -> int:
        runs.append(self._run)
        return compute(self, *args)

    def encode_flat(self: LosslessCodec, src: Any, out: np.ndarray) -> int:
        kept.append(out[:1000])
        if abandoned:
            runs[-1].abandon()
        return encode(self, src, out)

    if WORLD.rank == 0:
        monkeypatch.setattr(PythonSteps, "_compute", spy)
        monkeypatch.setattr(LosslessCodec, "encode_flat", encode_flat)
    error: BaseException | None = None
    try:
        comm.Allreduce(MPI.IN_PLACE, gaussian(N), algorithm="direct")
    except (hc.RemoteError, RuntimeError) as caught:
        error = caught
    verdict(("gave the operation up" in str(error)) is abandoned, repr(error))
    monkeypatch.undo()

    def busy() -> int:
        for seed in range(10):
            x = gaussian(N, seed=seed)
            comm.Allreduce(MPI.IN_PLACE, x, algorithm="direct")
            verdict(identical(x))
        return int(native_engine().engine_used_bytes())

    before = [out.tobytes() for out in kept]
    used = busy()
    verdict([out.tobytes() for out in kept] == before)
    kept.clear()
    verdict(busy() <= used)


def test_a_damaged_message_is_an_error_on_all_ranks(make, monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY.name, "0")
    comm = make("lossless")
    if WORLD.rank == 0:
        native_engine().engine_damage(1, 1024)
    kind = hc.WireError if WORLD.rank == 1 else hc.RemoteError
    with pytest.raises(kind, match="damaged message: CRC"):
        comm.Allreduce(MPI.IN_PLACE, gaussian(N), algorithm="direct")
    verdict(True)


def test_a_rank_of_another_codec_is_named(make):
    comm = make("none", timeout=10.0)
    codec = "lossless" if WORLD.rank else "mpc"
    with pytest.raises(
        (hc.MismatchError, hc.RemoteError), match=r"MismatchError|expects .* by '(lossless|mpc)"
    ):
        comm.Allreduce(MPI.IN_PLACE, gaussian(1000), codec=codec, algorithm="direct")
    verdict(True)


def test_an_operation_whose_time_is_over_ends_while_a_step_runs(make, monkeypatch):
    """The step is not interrupted; its rank is told afterwards, in its next operation at the latest."""
    comm = make("lossless", timeout=0.4)
    honest = LosslessCodec.encode_flat

    def encode_flat(self: LosslessCodec, src: Any, out: np.ndarray) -> int:
        time.sleep(1)
        return honest(self, src, out)

    if WORLD.rank == 0:
        monkeypatch.setattr(LosslessCodec, "encode_flat", encode_flat)
    began = time.monotonic()
    error: BaseException | None = None
    for _ in range(2 if WORLD.rank == 0 else 1):
        try:
            comm.Allreduce(MPI.IN_PLACE, gaussian(1000), algorithm="direct")
        except (hc.CollectiveTimeoutError, hc.RemoteError) as caught:
            error = caught
            break
    kinds = (hc.CollectiveTimeoutError, hc.RemoteError) if WORLD.rank == 0 else hc.CollectiveTimeoutError
    verdict(isinstance(error, kinds), repr(error))
    verdict(time.monotonic() - began < 20)


def test_an_all_reduce_that_was_interrupted_goes_on_and_ends_right(make):
    interrupt_often(make("lossless"), N, 20)


def test_operations_that_nobody_waits_for_end(make, counted):
    comm = make("lossless")
    ended = [threading.Event() for _ in range(4)]
    arrays = [gaussian(N, seed=i) for i in range(4)]
    requests = [
        comm.Iallreduce(MPI.IN_PLACE, x, codec=("lossless", "int8")[i % 2]) for i, x in enumerate(arrays)
    ]
    for request, event in zip(requests, ended, strict=True):
        request.add_done_callback(lambda _, event=event: event.set())
    verdict(all(event.wait(20) for event in ended))
    by_thread = WORLD.allgather("hybridcomp-progress" in counted)  # not where all else was here at the start
    verdict(any(by_thread), str(set(counted)))
    for request, x in zip(requests, arrays, strict=True):
        request.wait()
        verdict(identical(x))


def test_threads_that_overlap_on_communicators_of_their_own(make):
    """Random programs: blocking and not, of codecs that need Python and of some that do not."""
    codecs = ["lossless", "int8", "mpc", "none", "topk:ratio=0.1,values=int8"]
    overlap([make("none") for _ in range(3)], [1, 100, 5_000, 70_000], 40, codecs)


def test_memory_of_messages_is_used_again(make):
    comm = make("lossless")
    for _ in range(5):
        comm.Allreduce(MPI.IN_PLACE, gaussian(N))
    WORLD.Barrier()
    before = native_engine().engine_used_bytes()
    for _ in range(30):
        comm.Allreduce(MPI.IN_PLACE, gaussian(N))
    after = native_engine().engine_used_bytes()
    verdict(after - before < 8 << 20, f"{before} to {after}")


def test_seconds_and_spans_are_counted(make, monkeypatch):
    recorder = trace.Recorder(Path())  # never written
    monkeypatch.setattr(trace, "recorder", recorder)
    comm = make("lossless")
    comm.Allreduce(MPI.IN_PLACE, gaussian(N))
    (row,) = comm.stats()
    verdict(row.encode_seconds > 0 and row.decode_seconds > 0 and row.wire_bytes > 0, str(row))
    (span,) = (span for span in recorder._spans if span.name == "all_reduce")
    names, begins = {part[0] for part in span.parts}, [part[1] for part in span.parts]
    verdict(names == {"encode", "decode"} and begins == sorted(begins), str(span.parts))
    verdict(span.began <= begins[0] and begins[-1] <= span.ended)
