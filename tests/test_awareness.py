"""Whether MPI takes device pointers, as told by libraries that are not here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridcomp import variables
from hybridcomp.collectives.device.cuda_aware import Library, decide
from hybridcomp.errors import ConfigError

OPEN_MPI = "Open MPI v4.1.6, package: Open MPI conda Distribution"
MPICH = "MPICH Version:      4.3.0"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.30.8 (ANL base 3.4a2)"
MVAPICH = "MVAPICH2 Version      :\t2.3.7"


def library(
    version: str = MPICH,
    query: bool | None = True,
    kinds: str = "",
    variable: Callable[[str], int | None] | dict[str, int] = {},  # noqa: B006
) -> Library:
    return Library(version, query, kinds, variable.get if isinstance(variable, dict) else variable)


@pytest.mark.parametrize("asked", [None, False, True])
def test_the_variable_overrides_what_mpi_says(asked: bool | None) -> None:
    assert decide({variables.CUDA_AWARE.name: "1"}, library(query=asked))[:2] == (True, True)
    assert decide({variables.CUDA_AWARE.name: "0"}, library(query=asked))[:2] == (False, False)
    assert decide({variables.CUDA_AWARE.name: "1"}, library(OPEN_MPI, asked))[:2] == (True, False)


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_another_value_is_an_error_that_says_what_is_allowed(value: str) -> None:
    with pytest.raises(ConfigError, match=r"HYBRIDCOMP_CUDA_AWARE is .*allowed: 1 .*, 0 .*, or unset"):
        decide({variables.CUDA_AWARE.name: value}, library())


@pytest.mark.parametrize("version", [MPICH, OPEN_MPI])
def test_the_query_decides(version: str) -> None:
    assert decide({}, library(version, True)).messages
    assert not decide({}, library(version, False)).messages
    assert "query" in decide({}, library(version, False)).why


def test_open_mpis_nonblocking_collectives_are_not_aware() -> None:
    assert decide({}, library(OPEN_MPI, True))[:2] == (True, False)
    assert decide({}, library(MPICH, True))[:2] == (True, True)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (OPEN_MPI, "opal_cuda_support"),
        (OPEN_MPI, "mpi_built_with_cuda_support"),
        (MPICH, "MPIR_CVAR_ENABLE_GPU"),
    ],
)
def test_built_with_cuda_and_switched_off(version: str, name: str) -> None:
    assert decide({}, library(version, variable={name: 1})).messages
    off = decide({}, library(version, variable={name: 0}))
    assert not off.messages
    assert name in off.why


@pytest.mark.parametrize(
    ("version", "name", "value", "aware"),
    [
        (OPEN_MPI, "OMPI_MCA_opal_cuda_support", "false", False),
        (OPEN_MPI, "OMPI_MCA_opal_cuda_support", "true", True),
        (MPICH, "MPIR_CVAR_ENABLE_GPU", "0", False),
        (MPICH, "MPIR_CVAR_ENABLE_GPU", "1", True),
        (OPEN_MPI, "MPIR_CVAR_ENABLE_GPU", "0", True),
        (CRAY, "MPICH_GPU_SUPPORT_ENABLED", "1", True),
        (CRAY, "MPICH_GPU_SUPPORT_ENABLED", "0", False),
        (CRAY, "OTHER", "1", False),
        (MVAPICH, "MV2_USE_CUDA", "1", True),
        (MVAPICH, "OTHER", "1", False),
    ],
)
def test_variables_of_the_environment_where_no_tool_reads_them(
    version: str, name: str, value: str, aware: bool
) -> None:
    assert decide({name: value}, library(version, variable=lambda _: None)).messages is aware


@pytest.mark.parametrize(
    ("kinds", "aware"),
    [
        ("", False),
        ("mpi,system", False),
        ("mpi,system,cuda", True),
        ("system, CUDA:device", True),
        ("rocm", False),
    ],
)
def test_memory_kinds_decide_where_there_is_no_query(kinds: str, aware: bool) -> None:
    assert decide({}, library(query=None, kinds=kinds)).messages is aware
