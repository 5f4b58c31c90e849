"""Buckets of the DDP hook in a device's memory: the bits that buckets in host memory get, and what goes wrong.

The device is the emulation, whose streams run only what somebody waits for, or, with HYBRIDCOMP_TEST_DEVICE=cuda, the
GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import as_dtype, flatten
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives.device.streams import StreamPair
from hybridcomp.device import Queue
from hybridcomp.policy.toml import parse_policy
from hybridcomp.torch.hook import device_reduce_tasks, plan
from hybridcomp.torch.hook.bucket import Bucket
from hybridcomp.torch.hook.context import HookContext
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.links import CommLink
from hybridcomp.torch.hook.schedule import Schedule
from hybridcomp.torch.hook.worker import Tasks
from tests.codecs.common import reseal
from tests.cuda.common import host_array, runtime, to_device, to_host
from tests.mpi.conftest import WORLD, communicator, identical, verdict
from tests.mpi.device.devices import RANK, SIZE, values

pytestmark = pytest.mark.ranks(least=2)  # one rank's hook has nothing to do
# Odd sizes, nothing at all, what is alone in its shard; two that are large enough to be chunks, in several batches.
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
_numbers = itertools.count()


def each(*lists: list[Any]) -> list[Any]:
    """All combinations on three ranks; on others some."""
    found = list(itertools.product(*lists)) if len(lists) > 1 else lists[0]
    return found[:: 1 if SIZE == 3 else 3]


N = sum(math.prod(shape) for shape in SHAPES.values())


class Ordered(CommLink):
    """A link that wants one order, as gloo does."""

    ordered = True


class Side:
    """What a hook keeps, in memory of one kind."""

    def __init__(self, link: CommLink, numbers: Iterator[int], *, device: bool) -> None:
        self.device = device
        self.context = HookContext("dp", link, ErrorFeedback(form=None), {}, Counts("dp"))
        self.context._batches = numbers  # several share a link

    def average(self, storage: np.ndarray, dtype: str, policy: Any, step: int) -> np.ndarray:
        """Average a bucket; return its values, or raise what a batch did."""
        kind = as_dtype(dtype)
        batches = plan.make_plan(policy, "dp", kind, list(SHAPES.items()), step)
        self.batches = len(batches)
        if self.device:
            # The values come last: who does not wait for them reads others.
            x = to_device(np.full(N, 7, kind.storage), kind)
            flat = flatten(x, device=True)._replace(shape=(N,))
            late = flatten(to_device(storage, kind), device=True).data
            stream = runtime().current_stream(x)
            Queue(runtime(), stream).copy(flat.data, late)
            ready = runtime().record(stream)
        else:
            x, ready = host_array(storage.copy(), dtype), None
            flat = flatten(x)
        ended: list[Exception | None] = []
        tasks = Tasks()
        schedule = Schedule(self.context.link, tasks)
        for run in Bucket(flat, batches, step, self.context, ready).runs():
            schedule.start(run, ended.append)
        schedule.flush()
        while len(ended) < len(batches):
            task = tasks.get()
            assert task is not None
            task()
        for error in ended:
            if error is not None:
                raise error
        return to_host(x) if self.device else flat.data

    def states(self) -> dict[str, np.ndarray]:
        return {**self.context.feedback.state_dict(), **self.context.factors}


@pytest.fixture(scope="module")
def links() -> Iterator[Callable[[type[CommLink]], CommLink]]:
    """One link of each kind: to make them takes longer than most tests do."""
    made: dict[type[CommLink], tuple[CommLink, Any]] = {}

    def find(kind: type[CommLink]) -> CommLink:
        if kind not in made:
            group = SimpleNamespace(comm=communicator("none"), beside=[])
            made[kind] = kind(group), group
        return made[kind][0]

    yield find
    for _, group in made.values():
        for comm in (*group.beside, group.comm):
            comm.Free()


@pytest.fixture
def sides(
    links: Callable[[type[CommLink]], CommLink], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Side]:
    monkeypatch.setattr(plan, "_CHUNK", 1024)
    monkeypatch.setattr(plan, "_BATCH_BYTES", 8192)
    monkeypatch.setattr(plan, "_LINEAR_BATCH_BYTES", 8192)
    monkeypatch.setattr(plan, "_SMALL", 1024)

    def factory(*, device: bool = True, link: type[CommLink] = CommLink) -> Side:
        return Side(links(link), _numbers, device=device)

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
    mine, theirs = one.states(), other.states()
    verdict(mine.keys() == theirs.keys(), f"{sorted(mine)} {sorted(theirs)}")
    for key, array in mine.items():
        verdict(array.tobytes() == theirs[key].tobytes(), key)


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
    ("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", None), ("lattice", "ef"), ("none", None)]
)
def test_a_link_that_wants_one_order(sides, codec, form):
    """Nothing comes between a batch's exchanges there: a device is waited for at once."""
    policy = policy_of(codec, form)
    device, host = sides(link=Ordered), sides(device=False)
    for step in range(2):
        storage = values(N, "float32", seed=step)
        got = device.average(storage, "float32", policy, step)
        agree(got, host.average(storage, "float32", policy, step), f"step {step}")


@pytest.mark.parametrize("link", [CommLink, Ordered])
@pytest.mark.parametrize(("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", "ef21"), ("none", None)])
def test_host_and_device_ranks_in_one_average(sides, codec, form, link):
    policy = policy_of(codec, form)
    mixed, host = sides(device=bool(RANK % 2), link=link), sides(device=False)
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
        later.context.feedback.load_state_dict(sort.context.feedback.state_dict())
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


def test_few_waits_and_few_copies(sides, monkeypatch):
    """By a codec of a fixed size: one wait in each phase of a batch, and one copy of all its messages."""
    monkeypatch.setattr(plan, "_SMALL", 1)
    monkeypatch.delitem(SHAPES, "nothing")  # so nothing is left for the host to put together
    downloads: list[int] = []
    download = StreamPair.download

    def counted(self: StreamPair, copies: Any) -> Any:
        downloads.append(sum(to.size > 4 for to, _ in copies))  # beside the status' word
        return download(self, copies)

    monkeypatch.setattr(StreamPair, "download", counted)
    device = sides()
    device.average(values(N, "float32"), "float32", policy_of("int8", "ef"), 0)
    verdict(device.batches > 2, f"{device.batches}")
    verdict(sorted(downloads) == sorted([1, 1, 0] * device.batches), f"{downloads}")


# -- what goes wrong -------------------------------------------------------------------------------------------


class Damaging(CommLink):
    """Changes a bit of the first message by a codec that this rank sends."""

    bit: int | None = None
    codec = 0
    forge = False

    def scatter(self, number: int, send: Any, counts: Any, *args: Any, **options: Any) -> Any:
        if self.bit is not None and hc.wire.peek(send).codec == self.codec:
            nbytes = 32 + hc.wire.peek(send).payload
            send[self.bit // 8 % nbytes] ^= 1 << self.bit % 8
            if self.forge:
                send[:nbytes] = reseal(send[:nbytes].copy())
            self.bit = None
        return super().scatter(number, send, counts, *args, **options)


def failure(side: Side, policy: Any, step: int) -> Exception | None:
    try:
        side.average(values(N, "float32", seed=step), "float32", policy, step)
    except hc.HybridcompError as error:
        return error
    return None


@pytest.mark.parametrize(("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", None), ("none", None)])
def test_a_damaged_message_fails_on_all_ranks(sides, codec, form):
    policy = policy_of(codec, form)
    device = sides(link=Damaging)
    link = device.context.link
    link.codec, link.forge = hc.get_codec(codec).wire_id, False
    for step, bit in enumerate((40 * 8, 31 * 8, 100 * 8)):
        link.bit = bit if RANK == SIZE - 1 else None
        error = failure(device, policy, step)
        verdict(isinstance(error, hc.WireError), repr(error))
    verdict(failure(device, policy, 9) is None, "and then all is well")


def test_damage_that_only_the_device_sees_fails_on_all_ranks(sides):
    """A bit of a payload whose CRC is right for it: some matter, and then to all ranks."""
    policy = policy_of("topk:ratio=0.3")
    device = sides(link=Damaging)
    link = device.context.link
    link.codec, link.forge = hc.get_codec("topk").wire_id, True
    found = []
    for bit in (49 * 8, 53 * 8 + 1, 60 * 8 + 2, 350 * 8):  # a length, a bitmap's bits, a value
        link.bit = bit if RANK == SIZE - 1 else None
        error = failure(device, policy, 0)
        everywhere = WORLD.allgather(isinstance(error, hc.WireError))
        verdict(all(everywhere) or not any(everywhere), repr(error))
        found += [text for text in WORLD.allgather(str(error)) if "malformed payload" in text]
    verdict(len(found) >= 3, f"{found}")


@pytest.mark.parametrize("phase", ["start_encode", "start_reduce", "encode"])
def test_a_rank_that_fails_lets_all_fail(sides, phase, monkeypatch):
    policy = policy_of("int8")
    device, host = sides(), sides(device=False)
    with monkeypatch.context() as patch:
        if RANK == 0:
            sound, calls = getattr(device_reduce_tasks.DeviceEncodedTask, phase), []

            def fail(self: Any, *args: Any) -> Any:
                calls.append(1)
                if len(calls) == 2:  # when something has been launched
                    raise hc.CudaUnavailableError("out of memory")
                return sound(self, *args)

            patch.setattr(device_reduce_tasks.DeviceEncodedTask, phase, fail)
        error = failure(device, policy, 0)
    kind = hc.CudaUnavailableError if RANK == 0 else hc.WireError
    verdict(isinstance(error, kind), repr(error))
    storage = values(N, "float32")
    agree(device.average(storage, "float32", policy, 1), host.average(storage, "float32", policy, 1), "after")


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.05"])
def test_a_device_that_fails_lets_all_fail(sides, codec, monkeypatch):
    """The second wait of a rank for its device ends with an error."""
    device = sides()
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            after, waits = CommLink.after, []

            def fail(self: CommLink, events: Any) -> Any:
                transfer = after(self, events)
                waits.append(1)
                if len(waits) != 2:
                    return transfer
                lost = hc.CudaUnavailableError("the device is lost")
                return SimpleNamespace(wait=mock.Mock(side_effect=lost), when_done=transfer.when_done)

            patch.setattr(CommLink, "after", fail)
        error = failure(device, policy_of(codec), 0)
    kind = hc.CudaUnavailableError if RANK == SIZE - 1 else hc.WireError
    verdict(isinstance(error, kind), repr(error))
