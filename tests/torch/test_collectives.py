"""The process group's methods, on one, two, three and five ranks."""

import pytest

from tests.torch.harness import case_names, check_case

MODULE = "collectives"


@pytest.mark.parametrize("case", case_names(MODULE))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_case(ranks: int, case: str) -> None:
    check_case(MODULE, ranks, case)
