"""Ranks of PyTorch that are killed in mid-training; more by ``make chaos``."""

from __future__ import annotations

import pytest

from tests.faults.deaths.torch_deaths import KINDS, scenario

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("kind", KINDS)
def test_who_lives_names_who_is_gone(kind: str) -> None:
    done = scenario(4, kind)
    assert done.outcomes["killed"] == 1
    assert sum(done.outcomes.values()) > 1
