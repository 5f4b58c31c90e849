"""Average the same buckets by two hooks, in a device's memory and in a host's, for their tests to compare.

They are averaged as over gloo or NCCL, in batches, whose bytes MPI moves here. The device is the emulation, whose
streams run only what somebody waits for, or, with HYBRIDCOMP_TEST_DEVICE=cuda, the GPU.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp.arrays import DType, as_dtype, flatten
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.policy.toml import parse_policy
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.exchange.group import Sizes
from hybridcomp.torch.exchange.packing import table_size, unpack
from hybridcomp.torch.exchange.staging import DeviceStaging
from hybridcomp.torch.hook import plan
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.over_torch import TorchOperations
from tests.cuda.common import host_array, runtime, to_device, to_host
from tests.mpi.conftest import WORLD, identical, verdict
from tests.mpi.device.devices import RANK, SIZE, values

# Odd sizes, an empty one, parameters that are alone in their shard; several batches.
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
    """Return all combinations on three ranks; on others some."""
    found = list(itertools.product(*lists)) if len(lists) > 1 else lists[0]
    return found[:: 1 if SIZE == 3 else 3]


N = sum(math.prod(shape) for shape in SHAPES.values())


class Exchanges:
    """Exchanges by MPI in place of torch's, in one order."""

    backend = "mpi"
    levels = 1
    timeout = 60.0
    staging: Any = None
    lanes = None

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.rank, self.size, self.key = RANK, SIZE, 0
        self.started = 0
        self.kept: list[object] = []

    def keep(self, failed: object) -> None:
        """Keep what an exchange that failed writes to: MPI may still do so."""
        self.kept.append(failed)

    def check_alike(self, policy: Any) -> Any:
        """Return the policy, which all tests have the same on all ranks."""
        return policy

    def topology(self) -> Topology:
        """Return hosts of two ranks, if there are to be two levels, the last one of those that are left."""
        return Topology.even(self.size, self.levels)

    def join_host(self, topology: Topology) -> str:
        """Leave all messages to MPI."""
        return ""

    def sizes(self, counts: Sequence[int], *, failed: bool, carried: bool) -> Sizes:
        said = self.comm.alltoall([(n, failed, carried) for n in counts])
        failures = [rank for rank, (_, failed, _) in enumerate(said) if failed]
        return Sizes([n for n, *_ in said], failures, any(carried for *_, carried in said))

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        self.started += 1
        request = self.comm.Ialltoallv(
            [send, list(counts), None, MPI.BYTE], [recv, list(sizes), None, MPI.BYTE]
        )
        return Exchange(request, (send, recv), sizes)


class TwoLevels(Exchanges):
    """Exchanges between hosts of two ranks."""

    levels = 2


class OnDevice(Exchanges):
    """Exchanges between hosts of two ranks, of bytes in a device's memory, as NCCL's.

    Attributes:
        read, written: copies through host memory, and waits for them, that stand for NCCL.
    """

    levels = 2
    read = written = 0

    def __init__(self, comm: MPI.Comm) -> None:
        super().__init__(comm)
        self.staging = DeviceStaging(runtime(), self._room)

    @staticmethod
    def _room(nbytes: int, stream: int) -> DeviceArray:
        return flatten(to_device(np.full(nbytes, 0xA5, np.uint8), DType.UINT8), device=True).data

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        """Start after the work of the staging's stream, as NCCL does, on a stream of its own."""
        queue = Queue(runtime(), runtime().new_stream()[0])
        runtime().follow(queue.stream, runtime().record(self.staging.stream))
        self.kinds.add(type(send).__name__)
        self.read += bool(send.size)
        self.written += any(sizes)
        here = queue.read(send)
        for end, count in zip(itertools.accumulate(counts), counts, strict=True):
            part = here[end - count : end].copy()
            for _, begin, stop in unpack(part, count):
                part[begin:stop] = 0
            self.stale += bool(part[table_size(len(unpack(part, count))) :].any())
        started = super().start(here, counts, np.empty(sum(sizes), np.uint8), sizes)
        return Uploaded(started, recv, queue, self.staging.stream)

    kinds: ClassVar[set[str]] = set()
    stale = 0  # parts whose padding carries what the memory held before


class Uploaded:
    """An exchange whose bytes come to the device after the host has been told that they do, as NCCL's."""

    def __init__(self, exchange: Exchange, recv: DeviceArray, queue: Queue, stream: int) -> None:
        self.exchange, self.recv, self.queue, self.stream = exchange, recv, queue, stream

    def wait(self) -> list[Any]:
        parts = self.exchange.wait()
        nbytes = sum(part.size for part in parts)
        self.pinned = runtime().pinned(max(nbytes, 1))[:nbytes]
        np.concatenate(parts, out=self.pinned)
        self.queue.upload(self.recv, self.pinned)
        runtime().follow(self.stream, runtime().record(self.queue.stream))
        ends = np.cumsum([part.size for part in parts]).tolist()
        return [self.recv[end - part.size : end] for end, part in zip(ends, parts, strict=True)]


class Exchange:
    def __init__(self, request: MPI.Request, buffers: Any, sizes: Sequence[int]) -> None:
        self.request, self.buffers, self.sizes = request, buffers, sizes

    def wait(self) -> list[Any]:
        self.request.Wait()
        return np.split(self.buffers[1][: sum(self.sizes)], np.cumsum(self.sizes)[:-1])


class Started(list):
    """The operations of a bucket."""

    def follow(self, request: Any, call: Any) -> None:
        self.append(request)


class Side:
    """Hold one hook's residuals and factors, and average its buckets in memory of one kind: a device's or a host's.

    Attributes:
        seconds: time that the last average took.
    """

    seconds = 0.0

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
            # The values come last: a reader that does not wait for them reads others.
            x = to_device(np.full(N, 7, kind.storage), kind)
            flat = flatten(x, device=True)._replace(shape=(N,))
            late = flatten(to_device(storage, kind), device=True).data
            Queue(runtime(), runtime().current_stream(x)).copy(flat.data, late)
        else:
            x = host_array(storage.copy(), dtype)
            flat = flatten(x)
        started = Started()
        began = time.perf_counter()
        self.operations.start(started, flat, split, step, on_host=False)
        self.operations.flush()
        errors = []
        for request in started:
            try:
                request.wait(60)
            except Exception as error:
                errors.append(error)
        self.seconds = time.perf_counter() - began
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
def hook_comm() -> Iterator[MPI.Comm]:
    made = WORLD.Dup()
    yield made
    made.Free()


@pytest.fixture
def sides(hook_comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Side]]:
    monkeypatch.setattr(plan, "_BATCH_BYTES", 8192)
    monkeypatch.setattr(plan, "_LINEAR_BATCH_BYTES", 8192)
    monkeypatch.setattr(plan, "_SMALL", 1024)

    def factory(*, device: bool = True, exchanges: type[Exchanges] = Exchanges) -> Side:
        return Side(exchanges(hook_comm), device=device)

    return factory


def policy_of(codec: str, form: str | None = None) -> Any:
    entry = f'codec = "{codec}"' + (f', feedback = "{form}"' if form else "")
    text = f'min_bytes = 1\nexclude = ["*bias", "excluded"]\n[dp]\nall_reduce = {{ {entry} }}\n'
    return parse_policy(text, "test")


def agree(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Assert that the device's bits are the host's, and all ranks'."""
    wrong = np.flatnonzero(got.view(np.uint8) != want.view(np.uint8)) // got.itemsize
    verdict(not wrong.size, f"{what}: {wrong.size} bytes differ, the first of element {wrong[:1]}")
    verdict(identical(got), what)


def same_states(one: Side, other: Side) -> None:
    """Assert equal states. Ranks may differ: one that owns nothing of a parameter keeps none of its sum."""
    mine, theirs = one.states(), other.states()
    differ = [key for key in mine.keys() & theirs.keys() if mine[key].tobytes() != theirs[key].tobytes()]
    verdict(mine.keys() == theirs.keys() and not differ, f"{sorted(mine)} {sorted(theirs)} {differ}")


def check(
    sides: Callable[..., Side],
    codec: str,
    form: str | None,
    dtype: str,
    steps: int = 2,
    exchanges: tuple[type[Exchanges], type[Exchanges]] = (Exchanges, Exchanges),
) -> None:
    policy = policy_of(codec, form)
    device, host = sides(exchanges=exchanges[0]), sides(device=False, exchanges=exchanges[1])
    for step in range(steps):
        storage = values(N, dtype, seed=step)
        got = device.average(storage, dtype, policy, step)
        agree(got, host.average(storage, dtype, policy, step), f"{codec} {form} {dtype}, step {step}")
    same_states(device, host)
