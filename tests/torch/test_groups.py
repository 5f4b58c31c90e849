"""Groups, meshes and timeouts, on four ranks."""

import pytest

from tests.torch.harness import case_names, check_case

MODULE = "groups"


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(case: str) -> None:
    check_case(MODULE, 4, case)
