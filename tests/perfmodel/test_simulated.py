"""Predictions by simulation: what the wire, the cores and the algorithms bound, and that formulas choose alike."""

from __future__ import annotations

import dataclasses
import time

import pytest

from hybridcomp.codecs import get_codec
from hybridcomp.perfmodel import BUILT_IN, Setting, Tier, algorithms, choose
from hybridcomp.perfmodel.simulated import operation_of, seconds, timeline
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.topology import Topology

CHUNK = 1 << 20
LIMIT = 1.25


def setting(op: str, nbytes: int, codec: str = "int8", hosts: int = 4, ppn: int = 1) -> Setting:
    return Setting(op, nbytes, 4, get_codec(codec), hosts * ppn, hosts, ppn, compiled=True)


def able(where: Setting) -> list[str]:
    topology = Topology.even(where.ranks, where.ranks_per_host)
    return [
        name
        for name in algorithms(where.op)
        if not ALGORITHMS[where.op][name].sparse and ALGORITHMS[where.op][name].refuses(topology) is None
    ]


def test_much_data_takes_what_the_wire_takes() -> None:
    where = setting("all_reduce", 64 << 20, "none")
    wire = 2 * 3 / 4 * where.nbytes / BUILT_IN.network.bandwidth
    assert 1.0 <= seconds(BUILT_IN, "direct", where, CHUNK) / wire < 1.1


@pytest.mark.parametrize(
    "op", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"]
)
@pytest.mark.parametrize(("hosts", "ppn"), [(4, 1), (2, 2), (3, 1)])
def test_time_grows_with_bytes_and_falls_with_rate(op: str, hosts: int, ppn: int) -> None:
    fast = dataclasses.replace(BUILT_IN, network=Tier(BUILT_IN.network.latency, 1e9))
    name = "direct"
    times = [
        seconds(BUILT_IN, name, setting(op, n, "int8", hosts, ppn), CHUNK)
        for n in (1 << 12, 1 << 18, 1 << 24)
    ]
    assert times == sorted(times)
    assert seconds(fast, name, setting(op, 1 << 24, "int8", hosts, ppn), CHUNK) < times[-1]


def test_a_profile_whose_looks_take_no_time_is_simulated_all_the_same() -> None:
    where = setting("all_reduce", 1 << 16)
    quick, quicker = (
        seconds(dataclasses.replace(BUILT_IN, look=look), "direct", where, CHUNK) for look in (1e-7, 1e-12)
    )
    assert quick == quicker


def test_ranks_that_share_cores_take_longer() -> None:
    where = setting("all_reduce", 1 << 22, hosts=4, ppn=2)
    alone, shared = (seconds(BUILT_IN, "direct", where, CHUNK, cores) for cores in (None, 2))
    busy = sum(timeline(BUILT_IN, "direct", where, CHUNK, 2).busy)
    assert shared > alone
    assert shared >= busy / 2 * 0.99


def test_a_thousand_ranks_take_seconds_to_simulate() -> None:
    """Hosts that do alike are simulated by one of them, whose time is that of all where both can be had."""
    where = setting("all_reduce", 1 << 20, hosts=16, ppn=8)
    began = time.monotonic()
    many = seconds(BUILT_IN, "direct", where, CHUNK)
    assert time.monotonic() - began < 30  # it takes some 2 s, none of them in the simulator
    assert operation_of(where, CHUNK, even=True).counts[0] % 128 == 0
    few = seconds(BUILT_IN, "direct", setting("all_reduce", 1 << 20, hosts=8, ppn=8), CHUNK)
    assert few < many


@pytest.mark.parametrize("rate", [25e6, 125e6, 1e9])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_what_the_formulas_choose_is_among_the_fastest_simulated(rate: float, codec: str) -> None:
    """Formulas choose at run time, since they take microseconds: their choice is held to the simulator's."""
    profile = dataclasses.replace(BUILT_IN, network=Tier(BUILT_IN.network.latency, rate))
    for op in ("all_reduce", "all_gather", "broadcast"):
        for ppn in (1, 2):
            for nbytes in (1 << 16, 1 << 20, 1 << 24):
                where = setting(op, nbytes, codec, 4, ppn)
                times = {name: seconds(profile, name, where, CHUNK) for name in able(where)}
                chosen = choose(profile, where, list(times))
                assert times[chosen] <= LIMIT * min(times.values()), (where, times, chosen)
