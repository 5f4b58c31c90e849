"""Curves of MPI's own operations: their three parts, their fit, and where predictions take them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hybridcomp.codecs import get_codec
from hybridcomp.perfmodel import BUILT_IN, Curve, MpiCurves, Profile, Setting, carried_by_mpi, predict
from hybridcomp.perfmodel.curves import OPERATIONS, bus_factor, fit_curve
from hybridcomp.perfmodel.mpi import MPI
from hybridcomp.perfmodel.simulated import seconds
from hybridcomp.schedules.registry import ALGORITHMS

CURVE = Curve(overhead=1e-4, L=3.0, k=0.5, x0=14.0, b=5.0, ln_p=8.0, sat_p=22.0, max_bw=1e8)
SIZES = [1 << power for power in range(4, 25)]


def setting(op: str = "all_gather", nbytes: int = 1 << 20, **others: object) -> Setting:
    values = {"itemsize": 4, "codec": get_codec("none"), "ranks": 8, "hosts": 4, "ranks_per_host": 2}
    return Setting(**{"op": op, "nbytes": nbytes, "compiled": True, **values, **others})  # type: ignore[arg-type]


def test_the_three_parts_by_hand() -> None:
    assert CURVE.seconds(256, 2.0) == CURVE.overhead
    assert CURVE.seconds(0, 2.0) == CURVE.overhead
    assert CURVE.seconds(1 << 14, 1.5) == pytest.approx(
        (1 << 14) * 1.5 / 10**6.5
    )  # where the sigmoid is at a half
    assert CURVE.seconds(1 << 23, 1.5) == pytest.approx((1 << 23) * 1.5 / 1e8 + 1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_fit_is_near_what_it_was_not_given(noise: float) -> None:
    true = lambda n: 60e-6 + n * 1.5 / 1.2e8  # noqa: E731  (latency and a wire)
    drawn = np.random.default_rng(1).normal(1.0, noise, len(SIZES)) if noise else np.ones(len(SIZES))
    curve = fit_curve(SIZES, [true(n) * x for n, x in zip(SIZES, drawn, strict=True)], 1.5)
    between = [3 * n // 2 for n in SIZES[:-1]]
    errors = [abs(curve.seconds(n, 1.5) / true(n) - 1) for n in between]
    assert np.median(errors) < 0.05
    assert max(errors) < 0.25


def fitted_or_none(seconds: list[float]) -> Curve | None:
    try:
        return fit_curve(SIZES, seconds, 1.0)
    except ValueError:
        return None


def test_a_fit_of_anything_gives_finite_times_if_it_gives_any() -> None:
    rng = np.random.default_rng(2)
    found = [fitted_or_none(np.exp(rng.normal(-8, 2, len(SIZES))).tolist()) for _ in range(10)]
    curves = [curve for curve in found if curve is not None]
    assert len(curves) > 5
    for curve in curves:
        assert all(np.isfinite(curve.seconds(n, 1.0)) and curve.seconds(n, 1.0) > 0 for n in SIZES)
        profile = dataclasses.replace(BUILT_IN, mpi=MpiCurves(1, 2, {"broadcast": curve}))
        assert Profile.from_bytes(profile.to_bytes()) == profile


def test_too_few_sizes_and_unknown_operations() -> None:
    with pytest.raises(ValueError, match="at least 5 sizes, not 4"):
        fit_curve(SIZES[:4], [1e-3] * 4, 1.0)
    with pytest.raises(ValueError, match="no curve of the operation 'scan'; known: all_reduce"):
        bus_factor("scan", 4)


def test_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(op, 4) for op in OPERATIONS] == [1.5, 0.75, 0.75, 0.75, 1.0]


def test_curves_are_for_their_ranks_and_for_what_mpi_carries() -> None:
    profile = dataclasses.replace(
        BUILT_IN, mpi=MpiCurves(4, 8, {"all_gather": CURVE, "reduce_scatter": CURVE})
    )
    by_curve = CURVE.seconds(1 << 20, bus_factor("all_gather", 8))
    assert predict(profile, MPI, setting()) == by_curve
    assert seconds(profile, MPI, setting(), 1 << 20) == by_curve
    for other in (
        setting(ranks=4, ranks_per_host=1),
        setting("broadcast"),
        setting("reduce_scatter", itemsize=2),
    ):
        assert predict(profile, MPI, other) == predict(BUILT_IN, MPI, other)
        assert seconds(profile, MPI, other, 1 << 20) == seconds(
            BUILT_IN, next(iter(ALGORITHMS[other.op])), other, 1 << 20
        )
    assert carried_by_mpi(setting())
    assert carried_by_mpi(setting("reduce_scatter"))
    assert carried_by_mpi(setting("all_reduce", compiled=False))
    assert not carried_by_mpi(setting("all_reduce"))
    assert not carried_by_mpi(setting("reduce_scatter", itemsize=2))
    assert not carried_by_mpi(setting(codec=get_codec("int8")))
