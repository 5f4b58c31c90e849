"""Ranges in torch's profiler, on two ranks."""

import pytest

from tests.torch.harness import case_names, check_case

MODULE = "profiler"


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(case: str) -> None:
    check_case(MODULE, 2, case)
