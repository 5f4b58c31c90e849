"""Tags that come round, communicators that come and go with faults: a short form; ``make age`` is a long one."""

from __future__ import annotations

import pytest

from tests.faults.age.age import scenario
from tests.faults.age.age_lives import FAULTS, NEEDS_MESSAGES


# On two ranks over MPI, and on two with shared memory.
@pytest.mark.timeout(90)
@pytest.mark.parametrize(("seed", "over_mpi"), [(1, True), (4, False)])
def test_nothing_is_left_of_a_long_life(seed: int, over_mpi: bool) -> None:
    done = scenario(seed)
    comes = set(FAULTS) - (set() if over_mpi else NEEDS_MESSAGES)
    assert set(done.faults) == comes | {"tags come round at 20000", "tags come round at 2**32"}
    assert done.outcomes["right"] > 3_000
    assert done.outcomes["CollectiveTimeoutError"] == done.faults["rank late"]
