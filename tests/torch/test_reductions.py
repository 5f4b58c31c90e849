"""Reductions beyond plain arrays, and calls without data, on one and on three ranks."""

import pytest

from tests.torch.harness import case_names, check_case

MODULE = "reductions"


@pytest.mark.parametrize("case", case_names(MODULE))
@pytest.mark.parametrize("ranks", [1, 3])
def test_case(ranks: int, case: str) -> None:
    check_case(MODULE, ranks, case)
