"""Links that drop all one way, lose packets, or go before ranks have met; ``make chaos`` has more, and longer ones."""

from __future__ import annotations

import pytest

from tests.faults.links.links import scenario

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(90),
    pytest.mark.usefixtures("namespaces"),
]


@pytest.mark.parametrize(
    ("seed", "sort", "outcome"),
    [
        (64, "link mute for 1 s", {"right": 6}),
        (34, "link loses packets", {"right": 3}),
        (23, "link vanished", {"CollectiveTimeoutError": 3}),
    ],
)
def test_a_link_with_a_fault(seed: int, sort: str, outcome: dict[str, int]) -> None:
    done = scenario(seed)
    assert (done.faults, done.outcomes) == ({sort: 1}, outcome)
