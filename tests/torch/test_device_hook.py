"""DDP with the hook, whose buckets are encoded on their device."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("device_hook"))
def test_case(case: str) -> None:
    check_case("device_hook", 3, case)
