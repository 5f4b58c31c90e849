"""Buckets of the DDP hook in a device's memory: the bits that buckets in host memory get, and what goes wrong.

They are averaged as over gloo or NCCL, in batches, whose bytes MPI moves here. The device is the emulation, whose
streams run only what somebody waits for, or, with HYBRIDCOMP_TEST_DEVICE=cuda, the GPU.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.arrays import as_dtype, flatten
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives.device import data_path
from hybridcomp.collectives.device.data_path import DeviceCarrier
from hybridcomp.collectives.device.mailbox import Outgoing
from hybridcomp.device import Queue
from hybridcomp.policy.toml import parse_policy
from hybridcomp.torch.exchange import communicator
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.exchange.group import Sizes
from hybridcomp.torch.exchange.packing import packed_size
from hybridcomp.torch.hook import plan
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.over_torch import TorchOperations
from tests.codecs.common import reseal
from tests.cuda.common import host_array, runtime, to_device, to_host
from tests.mpi.conftest import WORLD, identical, verdict
from tests.mpi.device.devices import RANK, SIZE, values

pytestmark = pytest.mark.ranks(least=2)  # one rank's hook has nothing to do
# Odd sizes, nothing at all, what is alone in its shard; several batches.
SHAPES = {
    "weight": (23, 61),
    "bias": (61,),
    "embedding": (2503,),
    "norm.bias": (3,),
    "nothing": (0,),
    "head": (2, 101),
    "head.bias": (1,),
    "excluded": (1300,),
}
DTYPES = ["float32", "float16", "bfloat16", "float64"]


def each(*lists: list[Any]) -> list[Any]:
    """All combinations on three ranks; on others some."""
    found = list(itertools.product(*lists)) if len(lists) > 1 else lists[0]
    return found[:: 1 if SIZE == 3 else 3]


N = sum(math.prod(shape) for shape in SHAPES.values())


class Exchanges:
    """Exchanges by MPI in place of torch's, in one order."""

    backend = "mpi"

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.rank, self.size = RANK, SIZE
        self.started = 0

    def check_policy(self, policy: Any) -> None:
        """All tests' policies are the same on all ranks."""

    def sizes(self, counts: Sequence[int], *, failed: bool) -> Sizes:
        said = self.comm.alltoall([(n, failed) for n in counts])
        return Sizes([n for n, _ in said], [rank for rank, (_, failed) in enumerate(said) if failed])

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        self.started += 1
        request = self.comm.Ialltoallv(
            [send, list(counts), None, MPI.BYTE], [recv, list(sizes), None, MPI.BYTE]
        )
        return Exchange(request, (send, recv), sizes)


class Exchange:
    def __init__(self, request: MPI.Request, buffers: Any, sizes: Sequence[int]) -> None:
        self.request, self.buffers, self.sizes = request, buffers, sizes

    def wait(self) -> list[Any]:
        self.request.Wait()
        return np.split(self.buffers[1][: sum(self.sizes)], np.cumsum(self.sizes)[:-1])


class Started(list):
    """The operations of a bucket."""

    def follow(self, request: Any, call: Any, pieces: Any) -> None:
        self.append(request)


class Side:
    """What a hook keeps, in memory of one kind."""

    def __init__(self, exchanges: Any, *, device: bool) -> None:
        self.device = device
        self.exchanges = exchanges
        self.feedback, self.factors = ErrorFeedback(form=None), {}
        self.comm = TorchCommunicator(exchanges, None, "dp", self.feedback, "hybridcomp-test")
        self.comm.warm = self.factors
        self.operations = TorchOperations(self.comm, Counts("dp"))
        self.comm.on_start = self.operations.note

    def average(self, storage: np.ndarray, dtype: str, policy: Any, step: int) -> np.ndarray:
        """Average a bucket; return its values, or raise what an operation did."""
        kind = as_dtype(dtype)
        split = plan.make_split(policy, "dp", kind, list(SHAPES.items()), step)
        self.batches = len(plan.batches(split, kind))
        if self.device:
            # The values come last: who does not wait for them reads others.
            x = to_device(np.full(N, 7, kind.storage), kind)
            flat = flatten(x, device=True)._replace(shape=(N,))
            late = flatten(to_device(storage, kind), device=True).data
            Queue(runtime(), runtime().current_stream(x)).copy(flat.data, late)
        else:
            x = host_array(storage.copy(), dtype)
            flat = flatten(x)
        started = Started()
        self.operations.start(started, flat, split, step, joins=False)
        self.operations.flush()
        errors = []
        for request in started:
            try:
                request.wait(60)
            except Exception as error:
                errors.append(error)
        # After a failure exchanges follow that tell of it.
        ended = threading.Event()
        self.comm._worker.submit(ended.set)
        assert ended.wait(60)
        if errors:
            raise errors[0]
        return to_host(x) if self.device else flat.data

    def states(self) -> dict[str, np.ndarray]:
        return {**self.feedback.state_dict(), **self.factors}


@pytest.fixture(scope="module")
def comm() -> Iterator[MPI.Comm]:
    made = WORLD.Dup()
    yield made
    made.Free()


@pytest.fixture
def sides(comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Side]]:
    monkeypatch.setattr(plan, "_BATCH_BYTES", 8192)
    monkeypatch.setattr(plan, "_LINEAR_BATCH_BYTES", 8192)
    monkeypatch.setattr(plan, "_SMALL", 1024)

    def factory(*, device: bool = True, exchanges: type[Exchanges] = Exchanges) -> Side:
        return Side(exchanges(comm), device=device)

    return factory


def policy_of(codec: str, form: str | None = None) -> Any:
    entry = f'codec = "{codec}"' + (f', feedback = "{form}"' if form else "")
    text = f'min_bytes = 1\nexclude = ["*bias", "excluded"]\n[dp]\nall_reduce = {{ {entry} }}\n'
    return parse_policy(text, "test")


def agree(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """The device's bits are the host's, and all ranks'."""
    wrong = np.flatnonzero(got.view(np.uint8) != want.view(np.uint8)) // got.itemsize
    verdict(not wrong.size, f"{what}: {wrong.size} bytes differ, the first of element {wrong[:1]}")
    verdict(identical(got), what)


def same_states(one: Side, other: Side) -> None:
    """Ranks may have different states: one that owns nothing of a parameter keeps none of its sum."""
    mine, theirs = one.states(), other.states()
    differ = [key for key in mine.keys() & theirs.keys() if mine[key].tobytes() != theirs[key].tobytes()]
    verdict(mine.keys() == theirs.keys() and not differ, f"{sorted(mine)} {sorted(theirs)} {differ}")


def check(sides: Callable[..., Side], codec: str, form: str | None, dtype: str, steps: int = 2) -> None:
    policy = policy_of(codec, form)
    device, host = sides(), sides(device=False)
    for step in range(steps):
        storage = values(N, dtype, seed=step)
        got = device.average(storage, dtype, policy, step)
        agree(got, host.average(storage, dtype, policy, step), f"{codec} {form} {dtype}, step {step}")
    same_states(device, host)


@pytest.mark.parametrize(("codec", "dtype"), each(["none", "bf16", "int8", "topk:ratio=0.05"], DTYPES))
def test_codecs(sides, codec, dtype):
    check(sides, codec, None, dtype, 1)


@pytest.mark.parametrize(
    "codec",
    each(
        ["fp16", "int4:rounding=stochastic", "threshold:rel=2", "bounded:abs=0.01", "mpc", "lossless", "sign"]
    ),
)
def test_more_codecs(sides, codec):
    check(sides, codec, None, "float32", 2 if "stochastic" in codec else 1)


@pytest.mark.parametrize(
    ("codec", "form"),
    each(["int8:block=128", "int4:block=64", "topk:ratio=0.05"], ["ef", "ef21", "loco", "dgc"]),
)
def test_feedback(sides, codec, form):
    check(sides, codec, form, "float32")


@pytest.mark.parametrize(("form", "dtype"), each(["ef", "ef21"], DTYPES[1:]))
def test_feedback_of_other_dtypes(sides, form, dtype):
    check(sides, "int8:block=128", form, dtype, 2)


@pytest.mark.parametrize(
    ("codec", "form"), each(["sketch", "lattice", "randomblock:ratio=0.3"], ["ef", None])
)
def test_linear_codecs(sides, codec, form):
    check(sides, codec, form, "float32")


@pytest.mark.parametrize("form", [None, "ef"])
def test_powersgd(sides, form):
    """A device's matrix products round in other places: near the host's, and alike on all ranks."""
    policy = policy_of("powersgd:rank=2", form)
    device, host = sides(), sides(device=False)
    for step in range(3):
        storage = values(N, "float32", seed=step)
        got = device.average(storage, "float32", policy, step)
        want = host.average(storage, "float32", policy, step)
        verdict(identical(got), f"step {step}")
        verdict(bool(np.allclose(got, want, rtol=1e-3, atol=1e-3)), f"step {step}")
    verdict(device.states().keys() == host.states().keys())


@pytest.mark.parametrize(
    ("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", "ef21"), ("lattice", "ef"), ("none", None)]
)
def test_host_and_device_ranks_in_one_average(sides, codec, form):
    policy = policy_of(codec, form)
    mixed, host = sides(device=bool(RANK % 2)), sides(device=False)
    for step in range(2):
        storage = values(N, "float32", seed=step)
        got = mixed.average(storage, "float32", policy, step)
        agree(got, host.average(storage, "float32", policy, step), f"step {step}")


@pytest.mark.parametrize("form", each(["ef", "loco", "dgc", "ef21"]))
def test_memory_is_saved_and_loaded(sides, form):
    """On a device, on a host, and on a device again."""
    policy = policy_of("int4:block=64", form)
    sort, host = sides(), sides(device=False)
    for step, device in enumerate((True, False, True)):
        later = sides(device=device)
        later.feedback.load_state_dict(sort.feedback.state_dict())
        sort = later
        storage = values(N, "float32", seed=step)
        got = sort.average(storage, "float32", policy, step)
        agree(got, host.average(storage, "float32", policy, step), f"step {step}")


@pytest.mark.parametrize(("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", "dgc"), ("lattice", "ef")])
def test_what_is_not_finite(sides, codec, form):
    """The step overflows everywhere, and the memory stays good."""
    policy = policy_of(codec, form)
    device, host = sides(), sides(device=False)
    for step in range(3):
        storage = values(N, "float32", seed=step)
        if step == 1 and RANK == SIZE - 1:
            storage[::100] = np.inf
        with np.errstate(invalid="ignore"):
            got = device.average(storage, "float32", policy, step)
            want = host.average(storage, "float32", policy, step)
        finite = np.isfinite(want)
        verdict(bool((np.isfinite(got) == finite).all()), f"step {step}")
        agree(np.where(finite, got, 0), np.where(finite, want, 0), f"step {step}")
    same_states(device, host)


@pytest.mark.parametrize("device", [False, True])
def test_a_batch_is_two_exchanges(sides, device):
    """However many parameters it has, and without telling sizes once they are known."""
    side, told = sides(device=device), []
    sizes = side.exchanges.sizes
    side.exchanges.sizes = lambda *args, **how: told.append(1) or sizes(*args, **how)
    for step in range(3):
        side.average(values(N, "float32", seed=step), "float32", policy_of("int8", "ef"), step)
    verdict(side.batches > 1, f"{side.batches}")
    verdict(side.exchanges.started == 3 * 2 * side.batches, f"{side.exchanges.started}")
    verdict(len(told) == 2 * side.batches, f"{told}")


# -- what goes wrong -------------------------------------------------------------------------------------------


class Damaging(Exchanges):
    """Changes a bit of the first message by a codec that this rank sends, and of what it sends before the sums."""

    bit: int | None = None
    codec = 0
    forge = False

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        at = 0
        while self.bit is not None and at < send.size:
            nbytes = int(send[at + 8 : at + 16].view(np.int64)[0])
            message = send[at + 16 : at + 16 + nbytes]
            if hc.wire.peek(message).codec == self.codec:
                nbytes = 32 + hc.wire.peek(message).payload
                message[self.bit // 8 % nbytes] ^= 1 << self.bit % 8
                if self.forge:
                    message[:nbytes] = reseal(message[:nbytes].copy())
                self.bit = None
            at += packed_size(nbytes)
        return super().start(send, counts, recv, sizes)


def failure(side: Side, policy: Any, step: int) -> Exception | None:
    try:
        side.average(values(N, "float32", seed=step), "float32", policy, step)
    except hc.HybridcompError as error:
        return error
    return None


@pytest.mark.parametrize(("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", None), ("none", None)])
def test_a_damaged_message_fails_on_all_ranks(sides, codec, form):
    policy = policy_of(codec, form)
    device = sides(exchanges=Damaging)
    link = device.exchanges
    link.codec, link.forge = hc.get_codec(codec).wire_id, False
    for step, bit in enumerate((40 * 8, 31 * 8, 100 * 8)):
        link.bit = bit if RANK == SIZE - 1 else None
        error = failure(device, policy, step)
        verdict(isinstance(error, hc.WireError | hc.RemoteError), repr(error))
    verdict(failure(device, policy, 9) is None, "and then all is well")


def test_damage_that_only_the_device_sees_fails_on_all_ranks(sides):
    """A bit of a payload whose CRC is right for it: some matter, and then to all ranks."""
    policy = policy_of("topk:ratio=0.3")
    device = sides(exchanges=Damaging)
    link = device.exchanges
    link.codec, link.forge = hc.get_codec("topk").wire_id, True
    found = []
    for bit in (49 * 8, 53 * 8 + 1, 60 * 8 + 2, 350 * 8):  # a length, a bitmap's bits, a value
        link.bit = bit if RANK == SIZE - 1 else None
        error = failure(device, policy, 0)
        everywhere = WORLD.allgather(isinstance(error, hc.WireError | hc.RemoteError))
        verdict(all(everywhere) or not any(everywhere), repr(error))
        found += [text for text in WORLD.allgather(str(error)) if "damaged message" in text]
    verdict(len(found) >= 3, f"{found}")


def fails_second(sound: Any, error: Exception) -> Any:
    """A function that fails when it is called for the second time."""
    calls: list[int] = []

    def call(*args: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return sound(*args, **how)

    return call


@pytest.mark.parametrize("owner", [(DeviceCarrier, "encode"), (data_path, "divide"), (Outgoing, "wire")])
def test_a_rank_that_fails_lets_all_fail(sides, owner, monkeypatch):
    """When something has been launched."""
    policy = policy_of("int8")
    device, host = sides(), sides(device=False)
    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(*owner, fails_second(getattr(*owner), hc.CudaUnavailableError("out of memory")))
        error = failure(device, policy, 0)
    kind = hc.CudaUnavailableError if RANK == 0 else hc.RemoteError
    verdict(isinstance(error, kind), repr(error))
    storage = values(N, "float32")
    agree(device.average(storage, "float32", policy, 1), host.average(storage, "float32", policy, 1), "after")


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.05"])
def test_a_device_that_fails_lets_all_fail(sides, codec, monkeypatch):
    """The second time that a rank looks whether its device is ready, that has an error."""
    device = sides()
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            lost = hc.CudaUnavailableError("the device is lost")
            patch.setattr(Outgoing, "done", fails_second(Outgoing.done, lost))
        error = failure(device, policy_of(codec), 0)
    kind = hc.CudaUnavailableError if RANK == SIZE - 1 else hc.RemoteError
    verdict(isinstance(error, kind), repr(error))


def test_a_device_that_does_not_come_is_an_error(sides, monkeypatch):
    device = sides()
    monkeypatch.setattr(communicator, "_DEVICE_SECONDS", 0.5)
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(Outgoing, "done", lambda self: False)
        error = failure(device, policy_of("int8"), 0)
    kind = hc.CollectiveTimeoutError if RANK == SIZE - 1 else hc.RemoteError
    verdict(isinstance(error, kind), repr(error))
