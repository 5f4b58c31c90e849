"""Functional collectives on three ranks; loading them takes torch a while."""

import pytest

from tests.torch.harness import case_names, check_case

MODULE = "functional"


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(case: str) -> None:
    check_case(MODULE, 3, case)
