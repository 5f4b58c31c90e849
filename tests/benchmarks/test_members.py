"""The benchmark of replicas that come and go: the losses that it accepts, and those it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where its own modules are, as for a script
members = pytest.importorskip("members", reason="the trainer's extras")


def steps(losses: list[float], tokens: int) -> list[dict[str, float]]:
    return [{"step": n, "tokens": n * tokens, "loss": loss} for n, loss in enumerate(losses, 1)]


def halves(run: list[dict[str, float]], last: dict[str, float]) -> dict[str, list[float]]:
    return {by: members.means(run, by, last[by]) for by in ("tokens", "step")}


def test_losses(monkeypatch):
    """A run whose loss falls by step alone is accepted with fewer tokens a step, and refused beyond the spread."""
    monkeypatch.setattr(members, "WINDOWS", 2)
    falling = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5]
    disturbed = steps(falling, 3)
    undisturbed = [steps(falling, 4), steps([loss + 0.1 for loss in falling], 4)]
    after = [halves(run, disturbed[-1]) for run in undisturbed]
    assert members.check_losses(halves(disturbed, disturbed[-1]), *after) == pytest.approx(0.1)
    for shift, told in ((0.9, "above"), (-0.11, "below")):
        other = steps([loss + shift for loss in falling], 3)
        with pytest.raises(members.FailedError, match=f"the loss is {told} "):
            members.check_losses(halves(other, other[-1]), *after)
    late = steps([*falling[:4], 3.3, 3.3], 3)  # as good at first
    with pytest.raises(members.FailedError, match="the loss is above "):
        members.check_losses(halves(late, late[-1]), *after)
