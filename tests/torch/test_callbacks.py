"""Callbacks and PyTorch's hooks on two ranks."""

import pytest

from tests.torch.harness import case_names, check_case

MODULE = "callbacks"


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(case: str) -> None:
    check_case(MODULE, 2, case)
