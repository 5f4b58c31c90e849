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
from hybridcomp.torch.exchange.packing import ENTRY_BYTES, unpack
from tests.codecs.common import reseal
from tests.mpi.conftest import WORLD, verdict
from tests.mpi.device.devices import RANK, SIZE, values
from tests.mpi.device.hook_sides import (
    Exchange,
    Exchanges,
    N,
    OnDevice,
    Side,
    TwoLevels,
    agree,
    policy_of,
)

pytestmark = pytest.mark.ranks(least=2)  # one rank's hook has nothing to do


class Damaging(Exchanges):
    """Exchanges that change a bit of the first message by a codec that this rank sends, and of data before sums."""

    bit: int | None = None
    codec = 0
    forge = False
    retags = False

    def start(self, send: Any, counts: Sequence[int], recv: Any, sizes: Sequence[int]) -> Exchange:
        ends = np.cumsum(counts).tolist()
        if self.retags and send.size:
            self.retags = False
            send[ENTRY_BYTES] ^= 64  # a bit of the tag of the first message to the first rank
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


class DamagingOnDevice(OnDevice, Damaging):
    """Exchanges that damage what came from a device's memory, and goes there."""


def failure(side: Side, policy: Any, step: int) -> Exception | None:
    try:
        side.average(values(N, "float32", seed=step), "float32", policy, step)
    except hc.HybridcompError as error:
        return error
    return None


@pytest.mark.parametrize("exchanges", [Damaging, DamagingOnDevice])
@pytest.mark.parametrize(("codec", "form"), [("int8", "ef"), ("topk:ratio=0.05", None), ("none", None)])
def test_a_damaged_message_fails_on_all_ranks(sides, codec, form, exchanges):
    policy = policy_of(codec, form)
    device = sides(exchanges=exchanges)
    link = device.exchanges
    link.codec, link.forge = hc.get_codec(codec).wire_id, False
    verdict(failure(device, policy, 8) is None, "sizes and layouts are known from here on")
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


@pytest.mark.parametrize("exchanges", [Damaging, DamagingOnDevice])
def test_a_sound_message_of_another_kind_fails_on_all_ranks(sides, exchanges):
    """Its CRC is right: the header, or the beginning of the payload, is not what the receiver expects."""
    policy = policy_of("int8:block=64")
    device = sides(exchanges=exchanges)
    link = device.exchanges
    link.codec, link.forge = hc.get_codec("int8").wire_id, True
    verdict(failure(device, policy, 8) is None, "headers are foreseen from here on")
    for step, bit in enumerate(
        (5 * 8, 24 * 8, 32 * 8 + 6)
    ):  # the dtype, the parameters, the payload's prefix
        link.bit = bit if RANK == SIZE - 1 else None
        error = failure(device, policy, step)
        verdict(isinstance(error, hc.WireError | hc.MismatchError | hc.RemoteError), repr(error))


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2", "topk:ratio=0.05"])
def test_a_table_unlike_the_earlier_ones_fails_on_all_ranks(sides, codec):
    policy = policy_of(codec)
    device, host = sides(exchanges=DamagingOnDevice), sides(device=False, exchanges=TwoLevels)
    for step in range(2):
        device.exchanges.retags = RANK == 0
        error = failure(device, policy, step)
        verdict(isinstance(error, hc.WireError | hc.MismatchError | hc.RemoteError), repr(error))
        found = failure(device, policy, step)  # learns them, or keeps what is known
        verdict(found is None, repr(found))
        if codec == "int8":
            storage = values(N, "float32", seed=step)
            got, want = (side.average(storage, "float32", policy, step) for side in (device, host))
            agree(got, want, "after")


def test_a_rank_that_fails_where_layouts_are_known_tells_why(sides, monkeypatch):
    """Its text comes in the place of messages that are foreseen, and read before it is."""
    policy = policy_of("int8")
    device, host = sides(exchanges=OnDevice), sides(device=False, exchanges=TwoLevels)
    verdict(failure(device, policy, 0) is None)
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(
                DeviceCarrier, "encode", fails_second(DeviceCarrier.encode, hc.WireError("worn out"))
            )
        error = failure(device, policy, 1)
    if RANK == SIZE - 1:
        verdict(isinstance(error, hc.WireError), repr(error))
    else:
        verdict(isinstance(error, hc.RemoteError) and "worn out" in str(error), repr(error))
    storage = values(N, "float32")
    agree(device.average(storage, "float32", policy, 2), host.average(storage, "float32", policy, 2), "after")


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
