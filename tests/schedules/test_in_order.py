"""Schedules that end only where ranks do not do one step after another are refused."""

from __future__ import annotations

import pytest

from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.in_order import TAGS, check_in_order
from hybridcomp.schedules.recorder import Recorder
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule, Span
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.verify import verify

N = 8
OPERATION = Operation("all_gather", (N, N), 4)


def gather(rank: int, *, first: bool) -> Schedule:
    """Return an all-gather of two ranks: this one takes the other's part ``first``, or sends its own."""
    r = Recorder(OPERATION, Topology((0, 1)), rank)
    own, other, peer = r.slot(N), r.slot(N), 1 - rank
    r.recv(other, N, peer)
    if first:
        r.decode(other, Span(Buffer.RECV, peer * N, N))
    r.encode(own, Span(Buffer.SEND, 0, N))
    r.send(own, peer)
    r.decode(own, Span(Buffer.RECV, rank * N, N))
    if not first:
        r.decode(other, Span(Buffer.RECV, peer * N, N))
    return r.finish()


def test_who_sends_before_it_waits_ends():
    verify([gather(rank, first=False) for rank in (0, 1)])
    verify([gather(0, first=True), gather(1, first=False)])


def test_two_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError, match=r"rank 0.* step 1.*: it waits for ever"):
        verify([gather(rank, first=True) for rank in (0, 1)])


@pytest.mark.parametrize("last", [TAGS - 2, TAGS - 1])
def test_channels_that_share_a_tag_keep_one_order(last):
    """The last channel with a tag of its own, and the first one that shares one with those after it."""
    operation, topology = Operation("send", (N,), 4), Topology((0, 1))
    r = Recorder(operation, topology, 0)
    slot = r.slot(N)
    r.encode(slot, Span(Buffer.SEND, 0, N))
    for channel in (last, last + 1):
        r.send(slot, 1, channel)
    taking = Recorder(operation, topology, 1)
    for channel in (last + 1, last):
        slot = taking.slot(N)
        taking.recv(slot, N, 0, channel)
        taking.decode(slot, Span(Buffer.RECV, 0, N))
    both = [r.finish(), taking.finish()]
    if last < TAGS - 1:
        check_in_order(both)
    else:
        with pytest.raises(ScheduleError, match="it is not message 0 that rank 0 sends by its tag"):
            check_in_order(both)
