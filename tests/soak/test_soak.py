"""Four hundred mixed operations on four ranks leave nothing behind; ``make soak`` does twenty thousand on eight."""

import pytest

from tests.torch.harness import mpiexec

OPERATIONS = 400
RANKS = 4


@pytest.mark.long
@pytest.mark.timeout(200)  # some 25 s where nothing else runs
def test_nothing_is_left_of_many_operations() -> None:
    done = mpiexec(RANKS, "-m", "tests.soak.program", str(OPERATIONS), HYBRIDCOMP_SUMMARY="0", timeout=180)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert f"nothing leaked in {OPERATIONS} operations" in done.stdout
