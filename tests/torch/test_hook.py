"""The DDP hook on three ranks; some of it on one and five."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("hook"))
def test_case(case: str) -> None:
    check_case("hook", 3, case)


@pytest.mark.parametrize("case", case_names("hook_training"))
def test_training(case: str) -> None:
    check_case("hook_training", 3, case)


@pytest.mark.parametrize("case", case_names("hook_shapes"))
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_shapes(ranks: int, case: str) -> None:
    check_case("hook_shapes", ranks, case)


@pytest.mark.parametrize("case", case_names("hook_replicas"))
def test_replicas(case: str) -> None:
    check_case("hook_replicas", 3, case)
