"""ZeRO-1 over the process group."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("zero"))
def test_zero(case: str) -> None:
    check_case("zero", 3, case)
