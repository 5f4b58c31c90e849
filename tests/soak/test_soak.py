"""Mixed operations and 2,000 groups on four ranks leave nothing behind; ``make soak`` does 20,000 on eight."""

import pytest

from tests.torch.harness import mpiexec

OPERATIONS = 400
RANKS = 4
GROUPS = 2_000


@pytest.mark.long
@pytest.mark.timeout(200)  # some 25 s where nothing else runs
def test_nothing_is_left_of_many_operations() -> None:
    done = mpiexec(RANKS, "-m", "tests.soak.program", str(OPERATIONS), HYBRIDCOMP_SUMMARY="0", timeout=180)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert f"nothing leaked in {OPERATIONS} operations" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)  # some 30 s where nothing else runs
def test_nothing_is_left_of_many_groups() -> None:
    done = mpiexec(
        RANKS, "-m", "tests.soak.program", "--groups", str(GROUPS), HYBRIDCOMP_SUMMARY="0", timeout=280
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert f"nothing leaked in {GROUPS} groups" in done.stdout
