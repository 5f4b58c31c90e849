"""Ordinary uses of the backend on two ranks."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("uses"))
def test_case(case: str) -> None:
    check_case("uses", 2, case)
