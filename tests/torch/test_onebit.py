"""Optimizers that exchange their momentum, on groups of one to five ranks."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("onebit"))
def test_case(case: str) -> None:
    check_case("onebit", 5, case)
