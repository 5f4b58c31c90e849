"""The number of sidco's stages follows what its fits find."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import flatten
from tests.policy.job import NAMES, SIDCO, Job, rule

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student": lambda rng, n: rng.standard_t(3, n),
}


def reached(values: np.ndarray, ratio: float, stages: int, pareto: bool) -> tuple[int, int]:
    """Return how many magnitudes reach the limit of the paper's formulas, and how many should."""
    magnitudes, limit = np.abs(values.astype(np.float64)), 0.0
    k = math.ceil(ratio * values.size)
    share = k / values.size
    first = 0.25 if stages > 1 else share
    for part in [first] + [(share / first) ** (1 / max(stages - 1, 1))] * (stages - 1):
        beyond = magnitudes[magnitudes >= limit] - limit
        if not beyond.size:
            break
        mean, square = beyond.mean(), beyond.mean() ** 2 / beyond.var()
        shape = (square - 1) / 2
        limit += mean * (square + 1) / 2 * (1 - part**shape) / shape if pareto else -mean * math.log(part)
    return int((magnitudes >= limit).sum()), k


@pytest.mark.parametrize("ratio", [0.01, 0.001])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_stages_move_as_in_the_paper_until_the_share_is_right(kind, ratio):
    @functools.cache
    def values(step: int, rank: int, name: str) -> np.ndarray:
        rng = np.random.default_rng([step, rank, len(name)])
        return DISTRIBUTIONS[kind](rng, 30_000).astype(np.float32)

    for pareto, first in ((False, 1), (False, 4), (True, 1)):
        fit = f"stages={first},fit={'pareto' if pareto else 'exponential'}"
        rule_text = SIDCO.replace(":OPTIONS", "").replace("ratio=0.01", f"ratio={ratio:g},{fit}")
        assert rule(rule_text)[1].adapt.options == {"every": 5, "drift": 0.2, "scope": "tensor"}
        job = Job(*rule(rule_text.replace('"sidco"', '"sidco:every=2,scope=all"')), values)
        job.run(0, 12)
        stages, wanted = first, []
        for step in range(12):
            if step and step % 2 == 0:  # decided by what was measured two steps ago
                each = [
                    reached(values(step - 2, rank, name), ratio, stages, pareto)
                    for rank in range(3)
                    for name in NAMES
                ]
                part = sum(one for one, _ in each) / sum(k for _, k in each)
                stages += -1 if part > 1.2 else 1 if part < 0.8 else 0
                stages = min(max(stages, 1), math.ceil(math.log(ratio) / math.log(0.5)))
            wanted.append(stages)
        made = [hc.get_codec(spec).params for spec in job.codecs]
        assert [params["stages"] for params in made] == wanted
        assert {params["fit"] for params in made} == {"pareto" if pareto else "exponential"}
        sent = [
            hc.get_codec(job.codecs[-1]).select(flatten(values(step, 0, name))).count
            for step in range(12)
            for name in NAMES
        ]
        if kind != "student" or first == 1:  # else exponential stages keep less the more they are
            assert np.mean(sent) == pytest.approx(ratio * 30_000, rel=0.2)
        history = job.each[0].history()
        assert [one.history() for one in job.each] == [history] * 3
        assert len(history) == 1 + sum(a != b for a, b in itertools.pairwise(wanted))


def test_each_tensor_has_its_own_number():
    def values(step: int, rank: int, name: str) -> np.ndarray:
        rng = np.random.default_rng([step, rank])
        draw = DISTRIBUTIONS["gaussian" if name == NAMES[0] else "student"]
        return (draw(rng, 30_000) * (1 if name == NAMES[0] else 100)).astype(np.float32)

    def sent(options: str) -> list[float]:
        job = Job(*rule(SIDCO, options), values)
        job.run(0, 30)
        history = job.each[0].history()
        assert [one.history() for one in job.each] == [history] * 3
        last = {decision.name: hc.get_codec(decision.codec) for decision in history}
        counts = [last.get(name, last[""]).select(flatten(values(30, 0, name))).count for name in NAMES]
        return [count / 300 for count in counts]  # relative to a hundredth of the elements

    assert sent("every=2,scope=all")[0] < 0.75  # one number is not right for both
    assert sent("every=2") == pytest.approx([1, 1], abs=0.25)


def test_stages_of_what_has_no_tail():
    """Nothing moves where nothing can be sent, and zeros are not asked for."""
    job = Job(*rule(SIDCO, "every=2"), lambda *_: np.zeros(100, np.float32))
    job.run(0, 10)
    assert len(job.each[0].history()) == 1

    def few(step: int, rank: int, name: str) -> np.ndarray:
        flat = np.zeros(40_000, np.float32)
        flat[:50] = np.random.default_rng([step, rank]).uniform(1, 2, 50)
        return flat

    job = Job(*rule(SIDCO, "every=2"), few)
    job.run(0, 20)
    assert job.each[0].history()[-1].codec.endswith("stages=1")
    job.values = lambda step, rank, name: np.full(100, np.nan, np.float32)
    job.run(20, 30)
    assert len(job.each[0].history()) == 1
