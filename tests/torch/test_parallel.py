"""DDP, FSDP2, tensor parallelism, pipelines and checkpoints over the process group, on four ranks."""

import pytest

from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("parallel_exact"))
def test_exact(case: str) -> None:
    check_case("parallel_exact", 4, case)


@pytest.mark.parametrize("case", case_names("parallel_int8"))
def test_compressed(case: str) -> None:
    check_case("parallel_int8", 4, case)


@pytest.mark.parametrize("case", case_names("parallel_phases"))
def test_phases(case: str) -> None:
    check_case("parallel_phases", 4, case)
