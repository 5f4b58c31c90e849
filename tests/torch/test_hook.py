"""The DDP hook on three ranks; some of it on one and five."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("cases_hook"))
def test_case(case: str) -> None:
    check_case("cases_hook", 3, case)


@pytest.mark.parametrize("case", case_names("cases_hook_training"))
def test_training(case: str) -> None:
    check_case("cases_hook_training", 3, case)


@pytest.mark.parametrize("case", case_names("cases_hook_shapes"))
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_shapes(ranks: int, case: str) -> None:
    check_case("cases_hook_shapes", ranks, case)


@pytest.mark.parametrize("case", case_names("cases_hook_replicas"))
def test_replicas(case: str) -> None:
    check_case("cases_hook_replicas", 3, case)
