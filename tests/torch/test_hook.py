"""The DDP hook on three ranks; in training, on one, two and five, too."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("cases_hook"))
def test_case(case: str) -> None:
    check_case("cases_hook", 3, case)


@pytest.mark.parametrize("case", case_names("cases_hook_training"))
@pytest.mark.parametrize("ranks", [3, 5])
def test_training(ranks: int, case: str) -> None:
    check_case("cases_hook_training", ranks, case)


@pytest.mark.parametrize("case", case_names("cases_hook_replicas"))
def test_replicas(case: str) -> None:
    check_case("cases_hook_replicas", 3, case)
