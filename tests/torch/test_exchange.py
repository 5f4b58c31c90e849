"""Exchanges over a process group of torch's: how messages are packed, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.codecs import get_codec
from hybridcomp.collectives.transport.pools import HeapPool
from hybridcomp.policy import Choice
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.batch import BatchPlan
from hybridcomp.torch.exchange.packing import FAILED, pack_failure, packed_size, table_of, unpack
from hybridcomp.torch.exchange.transport import BatchTransport

MESSAGES = st.lists(st.tuples(st.integers(1, 1 << 40), st.binary(max_size=100)), max_size=6)


def packed(messages: list[tuple[int, bytes]]) -> np.ndarray:
    out = np.zeros(packed_size([len(data) for _, data in messages]), np.uint8)
    if messages:
        table, extents = table_of([(tag, len(data)) for tag, data in messages])
        out[: len(table)] = np.frombuffer(table, np.uint8)
        for (_, data), (_, begin, end) in zip(messages, extents, strict=True):
            out[begin:end] = np.frombuffer(data, np.uint8)
    return out


def unpacked(out: np.ndarray) -> list[tuple[int, bytes]]:
    return [(tag, out[begin:end].tobytes()) for tag, begin, end in unpack(out, out.size)]


def transports() -> list[BatchTransport]:
    topology = Topology((0, 1))
    return [BatchTransport(topology, rank, HeapPool()) for rank in range(2)]


def exchange(transports: list[BatchTransport]) -> None:
    sent = []
    for transport in transports:
        counts = transport.counts()
        out = np.empty(sum(counts), np.uint8)
        transport.pack(out, counts)
        sent.append(np.split(out, np.cumsum(counts)[:-1]))
    for rank, transport in enumerate(transports):
        transport.deliver([parts[rank] for parts in sent])


@settings(deadline=None)
@given(MESSAGES)
def test_what_was_packed_is_unpacked(messages: list[tuple[int, bytes]]) -> None:
    out = packed(messages)
    assert out.size % 16 == 0
    assert unpacked(out) == messages


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_other_bytes_are_refused_or_are_messages(
    messages: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    """Cut off, or with bytes changed: nothing outside of them is read."""
    out = packed(messages)
    raw = bytearray(out[: data.draw(st.integers(0, out.size))].tobytes())
    for at in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=4)) if raw else []:
        raw[at] = data.draw(st.integers(0, 255))
    try:
        found = unpack(np.frombuffer(bytes(raw), np.uint8), len(raw))
    except hc.WireError:
        return
    assert all(16 <= begin <= end <= len(raw) for _, begin, end in found)
    if not any(tag == FAILED for tag, _, _ in found):
        assert packed_size([end - begin for _, begin, end in found]) == len(raw)


@pytest.mark.parametrize("room", [0, 8, 16, 20, 200])
def test_a_failure_is_told_in_any_room(room: int) -> None:
    out = np.full(room, 255, np.uint8)
    pack_failure("MemoryError: none is left", out)
    if room < 16:
        assert not out.any()
        return
    ((tag, said),) = unpacked(out)
    assert tag == FAILED
    assert "MemoryError: none is left".startswith(said.decode())


def test_messages_of_one_tag_arrive_in_their_order() -> None:
    one, other = sides = transports()
    sent = [np.full(n, n, np.uint8) for n in (3, 40, 0)]
    requests = [one.isend(data, 1, tag) for data, tag in zip(sent, (7, 7, 9), strict=True)]
    rooms = [np.zeros(50, np.uint8) for _ in sent]
    waiting = [other.irecv(room, 0, tag) for room, tag in zip(rooms, (7, 7, 9), strict=True)]
    assert not any(request.Test() for request in requests + waiting)
    exchange(sides)
    assert all(request.Test() for request in requests + waiting)
    for data, room in zip(sent, rooms, strict=True):
        assert room[: data.size].tobytes() == data.tobytes()
        assert not room[data.size :].any()


def test_what_nobody_waits_for_is_refused() -> None:
    one, other = sides = transports()
    one.isend(np.zeros(5, np.uint8), 1, 1)
    with pytest.raises(
        hc.MismatchError, match="rank 0 sent a message of 5 bytes by tag 1, rank 1 expects none"
    ):
        exchange(sides)
    one.isend(np.zeros(5, np.uint8), 1, 2)
    other.irecv(np.zeros(4, np.uint8), 0, 2)
    with pytest.raises(hc.MismatchError, match="rank 1 has room for 4"):
        exchange(sides)


def test_a_plan_knows_its_exchanges_and_whether_sizes_change() -> None:
    def plan(op: str, *codecs: str, hosts: tuple[int, ...] = (0, 1)) -> BatchPlan:
        parts = [(Choice(get_codec(c), None, ""), 1000) for c in codecs]
        return BatchPlan.of(op, DType.FLOAT32, parts, (), Topology(hosts))

    assert plan("all_reduce", "int8", "none")[1:3] == (2, True)
    assert plan("all_reduce", "int8", "powersgd:rank=2")[1:3] == (4, True)
    assert plan("all_reduce", "sketch")[1:3] == (4, False)
    assert plan("all_reduce", "sketch:index=bloom")[1:3] == (4, True)
    assert plan("reduce_scatter", "topk:ratio=0.1")[1:3] == (1, False)
    assert plan("all_gather", "int8").key != plan("all_gather", "int4").key
    one_host, two = (0, 0, 0), (0, 0, 1)
    assert [plan("all_reduce", "int8", hosts=hosts).exchanges for hosts in (one_host, two)] == [2, 4]
    assert plan("all_reduce", "powersgd:rank=2", hosts=two).exchanges == 8
    assert [plan(op, "none", hosts=two).exchanges for op in ("reduce_scatter", "all_gather")] == [2, 2]
