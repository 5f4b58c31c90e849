"""Buckets of the DDP hook in a device's memory get the bits that buckets in host memory get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.mpi.conftest import identical, verdict
from tests.mpi.device.devices import RANK, SIZE, values
from tests.mpi.device.hook_sides import (
    DTYPES,
    N,
    OnDevice,
    Side,
    TwoLevels,
    agree,
    check,
    each,
    policy_of,
    same_states,
)

pytestmark = pytest.mark.ranks(least=2)  # one rank's hook has nothing to do


@pytest.mark.parametrize(("codec", "dtype"), each(["none", "bf16", "int8", "topk:ratio=0.05"], DTYPES))
def test_codecs(sides, codec, dtype):
    check(sides, codec, None, dtype, 1)


@pytest.mark.parametrize(
    "codec",
    each(
        [
            "fp16",
            "int4:rounding=stochastic",
            "threshold:rel=2",
            "bounded:abs=0.01",
            "bounded:abs=0.01,coder=huffman",  # by way of the host
            "mpc",
            "exponent",
            "lossless",
            "sign",
        ]
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
    """The memory goes from a device to a host, and to a device again."""
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
    """A batch is two exchanges however many parameters it has, and tells no sizes once they are known."""
    side, told = sides(device=device), []
    sizes = side.exchanges.sizes
    side.exchanges.sizes = lambda *args, **how: told.append(1) or sizes(*args, **how)
    for step in range(3):
        side.average(values(N, "float32", seed=step), "float32", policy_of("int8", "ef"), step)
    verdict(side.batches > 1, f"{side.batches}")
    verdict(side.exchanges.started == 3 * 2 * side.batches, f"{side.exchanges.started}")
    verdict(len(told) == 2 * side.batches, f"{told}")


TWO_LEVELS = [
    ("none", None),
    ("int8", "ef"),
    ("int4:block=64", "loco"),
    ("topk:ratio=0.05", None),
    ("sketch", None),
]


@pytest.mark.parametrize("exchanges", [TwoLevels, OnDevice])
@pytest.mark.parametrize(("codec", "form"), each(TWO_LEVELS))
def test_two_levels(sides, codec, form, exchanges):
    check(sides, codec, form, "float32", exchanges=(exchanges, TwoLevels))


def test_messages_stay_on_the_device(sides):
    """And are in the order of streams that the host has not waited for, once lengths are known: the second time."""
    OnDevice.kinds.clear()
    made: list[Side] = []

    def kept(**how: Any) -> Side:
        made.append(sides(**how))
        return made[-1]

    check(kept, "int8", None, "float32", 3, (OnDevice, TwoLevels))
    verdict(OnDevice.kinds == {"DeviceArray"}, f"{OnDevice.kinds}")
    verdict(not made[0].exchanges.stale, "padding carries what its memory held before")
