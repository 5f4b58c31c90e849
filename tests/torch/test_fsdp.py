"""FSDP2 with compressed communication."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("fsdp"))
def test_fsdp(case: str) -> None:
    check_case("fsdp", 3, case)


@pytest.mark.parametrize("case", case_names("fsdp_training"))
def test_training(case: str) -> None:
    check_case("fsdp_training", 3, case)


@pytest.mark.parametrize("case", case_names("fsdp_mesh"))
def test_mesh(case: str) -> None:
    check_case("fsdp_mesh", 4, case)
