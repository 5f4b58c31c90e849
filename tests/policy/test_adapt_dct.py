"""Test the rule of ``dct``: a threshold that is kept between rare refreshes."""

from __future__ import annotations

import numpy as np
import pytest

from hybridcomp.policy.adapt.thresholds import threshold_of
from tests.policy.job import DCT, NAMES, Job, drawn, rule


@pytest.mark.parametrize("scope", ["all", "tensor"])
def test_a_threshold_is_the_quantile_and_stays(scope):
    def values(step: int, rank: int, name: str) -> np.ndarray:
        return drawn(0, rank, name) * (5 if name == "first" else 1)

    job = Job(*rule(DCT, f"density=0.01,check=10,every=1000,scope={scope}"), values)
    job.run(0, 40)
    for name, tau in job.each[0]._controller.thresholds.items():
        names = NAMES if scope == "all" else [name]
        each = [np.abs(np.concatenate([values(0, rank, n) for n in names])) for rank in range(3)]
        wanted = np.mean([np.sort(x)[::-1][round(0.01 * x.size) - 1] for x in each])
        assert tau == pytest.approx(wanted, rel=1e-5)  # in six digits
    history = job.each[0].history()
    assert len(history) == (1 if scope == "all" else 2)
    assert [d.why for d in history] == ["first"] * len(history)
    assert [one.history() for one in job.each] == [history] * 3


def test_density_stays_near_its_target_as_gradients_shrink():
    """Early refreshes: within a quarter of the target after each check, though none is due."""

    def values(step: int, rank: int, name: str) -> np.ndarray:
        return drawn(step, rank, name, 40_000) * np.float32(0.99**step)

    job = Job(*rule(DCT, "density=0.005,check=5,every=1000"), values)
    job.run(0, 120)
    assert len(job.each[0].history()) > 3
    for step in (60, 119):
        job.run(step, step + 1)
    tau = job.each[0]._controller.thresholds[""]
    reached = np.mean(
        [np.mean(np.abs(values(119, rank, name)) >= tau) for rank in range(3) for name in NAMES]
    )
    assert abs(reached / 0.005 - 1) < 0.35  # the drift of up to two checks beyond


def test_a_young_threshold_follows_residuals_that_grow():
    """The growth of residuals in the first steps is seen long before the first check of 50."""

    def values(step: int, rank: int, name: str) -> np.ndarray:
        return drawn(step, rank, name, 40_000) * np.float32(min(1 + step, 16))

    job = Job(*rule(DCT, "density=0.01,check=50,every=1000"), values)
    job.run(0, 25)
    refreshed = [decision.step for decision in job.each[0].history()]
    # Step 0 is measured, and each first step after a refresh; decided two steps later, as long as values grow.
    assert refreshed[:5] == [2, 5, 8, 11, 14]
    tau = job.each[0]._controller.thresholds[""]
    reached = np.mean([np.mean(np.abs(values(24, rank, name)) >= tau) for rank in range(3) for name in NAMES])
    assert abs(reached / 0.01 - 1) < 0.25


def test_density_reaches_its_target_where_residuals_gather_below_the_threshold():
    """Values that gather in residuals until they are sent: a quantile lowers the threshold by a few percent only."""
    n = 40_000
    residuals = {(rank, name): np.zeros(n, np.float32) for rank in range(3) for name in NAMES}
    shares: dict[int, list[float]] = {}
    job: Job

    def values(step: int, rank: int, name: str) -> np.ndarray:
        scale = np.float32(1.0 if step < 30 else 0.2)
        found = residuals[rank, name] + drawn(step, rank, name, n) * scale
        tau = job.each[rank]._controller.thresholds.get("", 3.0)
        sent = np.abs(found) >= tau
        residuals[rank, name] = np.where(sent, 0, found)
        shares.setdefault(step, []).append(float(sent.mean()))
        return found

    job = Job(*rule(DCT, "density=0.01,check=50,every=1000"), values)
    job.run(0, 400)
    late = np.mean([np.mean(shares[step]) for step in range(300, 400)])
    assert abs(late / 0.01 - 1) < 0.25
    assert len(job.each[0].history()) < 100


def test_equal_magnitudes_reach_their_threshold():
    """A quantile is rounded towards zero: what has that magnitude is sent."""
    job = Job(*rule(DCT, "density=0.01,check=2"), lambda *_: np.full(4000, 0.1234567, np.float32))
    job.run(0, 4)
    assert job.codecs[-1] == "threshold:abs=0.123456"
    for quantile in np.random.default_rng(0).lognormal(0, 20, 1000).tolist():
        tau = threshold_of(quantile)
        assert quantile * (1 - 1.1e-5) < tau <= quantile
        assert tau == float(f"{tau:.6g}")


def test_zeros_have_no_threshold():
    job = Job(*rule(DCT, "density=0.01,check=2"), lambda *_: np.zeros(100, np.float32))
    job.run(0, 10)
    assert job.codecs[-1].startswith("threshold:rel=3")
