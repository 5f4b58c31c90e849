"""The benchmark of techniques: the runs and results that it accepts, and those it refuses."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from hybridcomp.policy.toml import parse_policy

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where its own modules are, as for a script
techniques = pytest.importorskip("techniques", reason="the trainer's extras")


def lines(losses, wire=100):
    return [
        {"kind": "train", "loss": loss, "step_seconds": 1.0 + i, "wire_bytes": {"pp": wire * (i + 1)}}
        for i, loss in enumerate(losses)
    ]


def variant(name="none"):
    return next(v for v in techniques.variants("int4", "int8") if v.name == name)


def test_policies_are_policies_and_differ():
    every = techniques.variants("powersgd:rank=16", "int4:block=128")
    assert len({(v.flags, parse_policy(v.policy, "f.toml").digest) for v in every}) == len(every)


def test_steps_that_settle_are_not_counted():
    one, seconds = variant(), []
    techniques.take(one, lines([4.0, 3.0, 2.0, 1.0, 0.5]), seconds, 5)
    assert seconds == [4.0, 5.0]
    assert one.wire == {"pp": 100.0}


@pytest.mark.parametrize("losses", [[4.0, 3.0, 2.0, math.nan], [4.0, 3.0, 2.0], [4.0, 3.0, 2.0, 1.5]])
def test_a_wrong_loss_is_refused(losses):
    one = variant()
    techniques.take(one, lines([4.0, 3.0, 2.0, 1.0]), [], 4)
    with pytest.raises(techniques.CheckError, match="losses"):
        techniques.take(one, lines(losses), [], 4)


def test_an_embedding_s_traffic_is_what_the_formula_says():
    two, fused = variant("two sums"), variant("fused")
    two.wire, fused.wire = {"embedding": 16.0}, {"embedding": 12.0}
    techniques.check_traffic([two, fused])
    fused.wire = {"embedding": 12.5}
    with pytest.raises(techniques.CheckError, match="embedding"):
        techniques.check_traffic([two, fused])
