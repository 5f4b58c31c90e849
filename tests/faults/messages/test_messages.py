"""Messages that are damaged, truncated, delayed or dropped; more by ``make chaos``."""

from __future__ import annotations

import pytest

from tests.faults.messages.messages import KINDS, scenario


@pytest.mark.parametrize("seed", [2, 5], ids=["in Python", "four ranks"])
def test_all_ranks_hold_the_right_bits_or_all_have_an_error(seed: int) -> None:
    done = scenario(seed)
    assert set(done.faults) >= {f"message {kind}" for kind in KINDS}
    assert done.outcomes["right"]
