"""Rules that adapt, on three ranks; groups that decide together, on four."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("adapt"))
def test_case(case: str) -> None:
    check_case("adapt", 3, case)


@pytest.mark.parametrize("case", case_names("together"))
def test_together(case: str) -> None:
    check_case("together", 4, case)
