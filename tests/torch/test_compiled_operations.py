"""Operations in compiled code whose messages exchanges carry, without a network: all ranks are in this process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridcomp.arrays import DType, as_dtype
from hybridcomp.codecs import get_codec
from hybridcomp.collectives.algorithms.schedules import OperationKey, Schedules
from hybridcomp.collectives.engine.programs import Programs
from hybridcomp.native import kernels
from hybridcomp.policy import Choice
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.batch import exchanges_of


class Rank:
    """A rank of a group whose members are all in this process, with one compiled all-reduce."""

    def __init__(
        self, topology: Topology, rank: int, codec: str, data: np.ndarray, *, in_place: bool
    ) -> None:
        ranks = len(topology.hosts)
        self.rank = rank
        self.carried = kernels().CarriedOperations(
            rank, [False] * ranks, topology.away(rank), kernels().SharedBlocks()
        )
        schedules = Schedules(topology, rank, None)
        programs = Programs(kernels().engine_group(0, rank, ranks, True), schedules)
        dtype = as_dtype(data.dtype)
        key = OperationKey.of("all_reduce", Choice(get_codec(codec), None, ""), dtype, (data.size,))
        self.send = data.copy()
        self.result = self.send if in_place else np.empty_like(data)
        self.run = self.carried.start(
            programs.find(key),
            self.carried.reserve(),
            kernels().address(self.send),
            kernels().address(self.result),
            None,
            (self.send, self.result),
            False,
        )


def carry(ranks: list[Rank]) -> int:
    """Carry the ranks' messages until their operations have ended; return the number of exchanges."""
    exchanges, kept = 0, []
    while True:
        for rank in ranks:
            rank.carried.run()
        if all(rank.run.done() for rank in ranks):
            return exchanges
        exchanges += 1
        bytes_of = [rank.carried.collect() for rank in ranks]
        sent = []
        for rank, (counts, _) in zip(ranks, bytes_of, strict=True):
            outs = [np.empty(n, np.uint8) for n in counts]
            for peer, out in enumerate(outs):
                if out.size:
                    rank.carried.pack(peer, out, out.size)
            rank.carried.sent()
            sent.append(outs)
        for rank, (_, most) in zip(ranks, bytes_of, strict=True):
            for peer, outs in enumerate(sent):
                got = outs[rank.rank]
                kept.append(got)  # messages are read where they are
                assert got.size <= most[peer]
                if got.size:
                    assert rank.carried.unpack(peer, got) is None


@pytest.mark.parametrize("codec", ["none", "int8:block=128", "exponent", "topk:ratio=0.2"])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2), (0, 0, 1), (0, 0, 1, 1), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_operations_go_by_exchanges(codec: str, hosts: tuple[int, ...], in_place: bool) -> None:
    topology = Topology(hosts)
    for n in (1, 3, 1000, 70_001):
        data = [np.random.default_rng(r).integers(-99, 99, n).astype(np.float32) for r in range(len(hosts))]
        ranks = [Rank(topology, r, codec, data[r], in_place=in_place) for r in range(len(hosts))]
        assert carry(ranks) <= exchanges_of("all_reduce", topology)
        assert all(rank.run.failure() is None for rank in ranks)
        assert len({rank.result.tobytes() for rank in ranks}) == 1
        if hosts == (0, 0, 1) and n > 2:  # without lanes what stays on a host is not said to leave it
            wire, _, between = ranks[0].run.tally()[:3]
            assert 0 < between < wire
        if codec in ("none", "exponent"):
            assert np.array_equal(ranks[0].result, sum(data))
        assert in_place or all(
            np.array_equal(rank.send, mine) for rank, mine in zip(ranks, data, strict=True)
        )


def first_exchange() -> tuple[list[Rank], np.ndarray]:
    """Return two ranks, and what the first one sends the second."""
    data = np.arange(1000, dtype=np.float32)
    ranks = [Rank(Topology((0, 1)), r, "int8:block=128", data, in_place=False) for r in range(2)]
    for rank in ranks:
        rank.carried.run()
    counts, _ = ranks[0].carried.collect()
    out = np.empty(counts[1], np.uint8)
    ranks[0].carried.pack(1, out, out.size)
    ranks[1].carried.collect()
    return ranks, out


@settings(deadline=None)
@given(st.data())
def test_other_bytes_for_compiled_operations_are_refused_or_are_messages(data: st.DataObject) -> None:
    ranks, out = first_exchange()
    raw = out[: data.draw(st.integers(0, out.size))].copy()
    if raw.size:
        for at in data.draw(st.lists(st.integers(0, min(raw.size, 80) - 1), max_size=4)):
            raw[at] = data.draw(st.integers(0, 255))
    ranks[1].carried.unpack(0, raw)
    ranks[1].carried.run()  # a damaged message fails the operation, and reads nothing else
    failure = ranks[1].run.failure()
    assert ranks[1].run.done() == (failure is not None)
    if raw.tobytes() == out.tobytes():
        assert failure is None


def test_a_compiled_operation_refuses_what_it_does_not_expect() -> None:
    ranks, out = first_exchange()
    assert ranks[1].carried.unpack(0, out[:16].copy()) == (
        False,
        "a table of tag 0 and 1 messages in 16 bytes",
    )
    below = out.copy()
    below[16:24] = 128  # of the first message: no number may overflow
    unlike, why = ranks[1].carried.unpack(0, below)
    assert not unlike
    assert "a message of tag -9187" in why
    again = out.copy()
    assert ranks[1].carried.unpack(0, out) is None
    unlike, why = ranks[1].carried.unpack(0, again)
    assert unlike
    assert "rank 1 expects none" in why
    for rank in ranks:
        rank.carried.abandon()
        assert rank.run.failure() is not None


def test_an_operation_given_up_gives_its_memory_back() -> None:
    """Blocks of a process serve all of its batches: those of a batch that failed, too."""
    blocks = kernels().SharedBlocks()
    taken = []
    for _ in range(3):
        carried = kernels().CarriedOperations(0, [False, False], [False, True], blocks)
        programs = Programs(kernels().engine_group(0, 0, 2, True), Schedules(Topology((0, 1)), 0, None))
        data = np.ones(1 << 20, np.float32)
        key = OperationKey.of("all_reduce", Choice(get_codec("int8"), None, ""), DType.FLOAT32, (data.size,))
        place = kernels().address(data)
        run = carried.start(programs.find(key), carried.reserve(), place, place, None, data, False)
        carried.run()
        carried.abandon()
        assert run.failure() is not None
        taken.append(blocks.held)
    assert taken == [0, 0, 0]
