"""Damage buckets of the DDP hook in a device's memory, or have one rank's device fail: all ranks get an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.collectives.device import data_path
from hybridcomp.collectives.device.data_path import DeviceCarrier
from hybridcomp.collectives.device.mailbox import Outgoing
from hybridcomp.torch.exchange import communicator
from hybridcomp.torch.exchange.packing import unpack
from tests.codecs.common import reseal
from tests.mpi.conftest import WORLD, verdict
from tests.mpi.device.devices import RANK, SIZE, values
from tests.mpi.device.hook_sides import (
    Exchange,
    Exchanges,
    N,
    Side,
    agree,
    policy_of,
)

pytestmark = pytest.mark.ranks(least=2)  # one rank's hook has nothing to do


class Damaging(Exchanges):
    """Exchanges that change a bit of the first message by a codec that this rank sends, and of data before sums."""

    bit: int | None = None
    codec = 0
    forge = False

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        ends = np.cumsum(counts).tolist()
        for end, count in zip(ends, counts, strict=True):
            part = send[end - count : end]
            for _, begin, stop in unpack(part, part.size):
                message = part[begin:stop]
                if self.bit is None or hc.wire.peek(message).codec != self.codec:
                    continue
                nbytes = 32 + hc.wire.peek(message).payload
                message[self.bit // 8 % nbytes] ^= 1 << self.bit % 8
                if self.forge:
                    message[:nbytes] = reseal(message[:nbytes].copy())
                self.bit = None
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
    """A bit of a payload is changed, and its CRC is right for it: some bits matter, and then to all ranks."""
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
    """Return a function that fails when it is called for the second time."""
    calls: list[int] = []

    def call(*args: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return sound(*args, **how)

    return call


@pytest.mark.parametrize("owner", [(DeviceCarrier, "encode"), (data_path, "divide"), (Outgoing, "wire")])
def test_a_rank_that_fails_lets_all_fail(sides, owner, monkeypatch):
    """The rank fails when something has been launched."""
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
    """The device has an error the second time that its rank looks whether it is ready."""
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
