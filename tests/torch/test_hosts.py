"""Hosts of several ranks, of unlike numbers, and of ranks that are not in their order."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("hosts"))
def test_case(case: str) -> None:
    check_case("hosts", 5, case)
