"""Ranks that are interrupted, stopped or killed; more by ``make chaos``."""

from __future__ import annotations

import pytest

from tests.faults.deaths.deaths import scenario

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("seed", "place", "sent"),
    [
        (3, "operations", "SIGINT"),
        (1, "callbacks", "SIGTERM"),
        (1, "operations", "SIGSTOP"),
        (108, "operations", "SIGKILL, kept"),
        (20, "operations", "SIGTERM death"),
        (106, "splitting", "SIGKILL"),
        (4, "making", "SIGTERM death"),
        (1, "rendezvous", "SIGSTOP"),
        (124, "exit", "SIGKILL"),
    ],
)
def test_who_lives_has_an_error_in_time_or_the_right_bits(seed: int, place: str, sent: str) -> None:
    done = scenario(seed, place, sent)
    assert done.faults == {f"{sent} in {place}": 1}
    assert done.outcomes["right"] or done.outcomes["killed"]
