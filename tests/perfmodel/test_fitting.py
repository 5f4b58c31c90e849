"""Fits of a profile to times of collectives: planted values are found, and values that nothing tells of stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hybridcomp.codecs import get_codec
from hybridcomp.perfmodel import BUILT_IN, Setting, Tier
from hybridcomp.perfmodel.fitting import START, Timing, adjusted, errors, fit, parameters, predict

TRUE = {"start": 45e-6, "far": 110e-6, "link": 0.8, "network latency": 150e-6, "memory": 0.5, "codecs": 0.6}
CASES = [("all_reduce", "int8"), ("all_reduce", "none"), ("all_gather", "int8"), ("reduce_scatter", "int4")]


def timings(base, sizes, hosts=4, ppn=1, found=TRUE):
    """Return times of a machine that differs from what was measured alone."""
    where = [
        Setting(op, n, 4, get_codec(codec), hosts * ppn, hosts, ppn, compiled=True)
        for op, codec in CASES
        for n in sizes
    ]
    unknown = [Timing(setting, "direct", 1.0) for setting in where]
    taken = predict(adjusted(base, found), unknown)
    return [dataclasses.replace(t, seconds=s) for t, s in zip(unknown, taken.tolist(), strict=True)]


def test_a_fit_predicts_other_sizes_of_a_machine_unlike_what_was_measured_alone():
    given, held_out = (
        timings(BUILT_IN, sizes) for sizes in ([1 << 10, 1 << 14, 1 << 18, 1 << 22], [3 << 14, 3 << 19])
    )
    refined = adjusted(BUILT_IN, fit(BUILT_IN, given))
    before, after = (
        errors(predict(profile, held_out), [t.seconds for t in held_out]) for profile in (BUILT_IN, refined)
    )
    assert before["geometric mean"] > 0.15
    assert after["geometric mean"] < 0.04
    assert after["95th percentile"] < 0.12
    assert refined.network.bandwidth == pytest.approx(0.8 * BUILT_IN.network.bandwidth, rel=0.1)


def test_a_fit_that_is_out_of_time_returns_the_best_it_has():
    given = timings(BUILT_IN, [1 << 14])
    assert set(fit(BUILT_IN, given, limit=0.0)) == set(parameters(BUILT_IN, given))


def test_what_times_say_nothing_of_is_no_parameter():
    def names(*args, base=BUILT_IN, **others):
        return set(parameters(base, timings(base, [1 << 14], *args, found={}, **others)))

    bursting = dataclasses.replace(BUILT_IN, network=Tier(6e-5, 1e8, 5e5, 4e8))
    assert names(1, 4).isdisjoint({"far", "wire", "eager", "network latency", "link", "burst"})
    assert names(4, 1).isdisjoint({"near", "host latency", "burst"})
    assert names(4, 2, base=bursting) == set(START) - {"slow_start"}
    plain = [t for t in timings(BUILT_IN, [1 << 14], found={}) if t.setting.codec.name == "none"]
    assert "codecs" not in parameters(BUILT_IN, plain)


def test_what_was_not_found_stays_and_factors_are_on_what_was_measured():
    bursting = dataclasses.replace(BUILT_IN, network=Tier(6e-5, 1e8, 5e5, 4e8))
    changed = adjusted(
        bursting, {"link": 0.5, "burst": 2.0, "codecs": 0.5, "host latency": 1e-5, "look": 1e-4}
    )
    assert changed.network == Tier(6e-5, 5e7, 1e6, 4e8)
    assert changed.host == dataclasses.replace(BUILT_IN.host, latency=1e-5)
    assert changed.codecs["default"].encode == BUILT_IN.codecs["default"].encode / 2
    assert changed.codecs["default"].overhead == BUILT_IN.codecs["default"].overhead
    assert (changed.look, changed.start, changed.memory) == (1e-4, BUILT_IN.start, BUILT_IN.memory)
    assert adjusted(bursting, {}) == bursting


def test_errors_by_hand():
    found = errors([1.1, 2.0, 0.5], [1.0, 1.0, 1.0])
    assert found["cells"] == 3
    assert found["mean"] == pytest.approx((0.1 + 1.0 + 0.5) / 3)
    assert found["geometric mean"] == pytest.approx((0.1 * 1.0 * 0.5) ** (1 / 3))
    assert found["95th percentile"] == pytest.approx(0.95)
    assert errors(np.ones(2), np.ones(2))["geometric mean"] == pytest.approx(1e-4)


def test_what_enters_a_host_faster_than_it_leaves():
    def taken(profile, op):
        setting = Setting(op, 1 << 22, 4, get_codec("none"), 4, 4, 1, compiled=True)
        return predict(profile, [Timing(setting, "direct", 1.0)])[0]

    both = dataclasses.replace(BUILT_IN, network=Tier(6e-5, 2.5e7))
    leaving = dataclasses.replace(BUILT_IN, network=Tier(6e-5, 2.5e7, incoming=2e9))
    # Three parts of a MiB enter rank 0: together, or one after another.
    assert 2.5 < taken(both, "reduce") / taken(leaving, "reduce") < 5
    assert taken(both, "all_reduce") == pytest.approx(taken(leaving, "all_reduce"), rel=0.1)
