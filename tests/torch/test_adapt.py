"""Rules that adapt, on three ranks and on one."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("adapt"))
def test_case(case: str) -> None:
    check_case("adapt", 3, case)
