"""Codecs of other packages among ranks: of all the same bits; where one lacks the package, all are told which."""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import pytest

import hybridcomp as hc
from tests.mpi.conftest import WORLD, gaussian, identical, relative_error, total, verdict
from tests.outside import EXAMPLE, POINTS, codec_package, install, installed

LAST = WORLD.size - 1
last = WORLD.rank == LAST


def error_of(call):
    """Return the error of a call, and the seconds until it came."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("name", ["acmeplain", "acme.plain"])
def test_a_package_that_one_rank_lacks_is_named_on_all(tmp_path, name):
    WORLD.Barrier()
    with nullcontext() if last else installed(codec_package(tmp_path, "acme-codecs", name, 240)):
        error, seconds = error_of(lambda: hc.Communicator(WORLD, name, "dp", timeout=20.0))
    told = f"rank {LAST}" in str(error) and "acme-codecs 1.0" in str(error) and name in str(error)
    verdict(isinstance(error, hc.PolicyError if last else hc.RemoteError) and told, repr(error))
    assert seconds < 5


@pytest.mark.ranks(least=2)
def test_versions_of_a_package_that_differ_are_named_on_all(tmp_path):
    version = "1.1" if last else "1.0"
    with installed(codec_package(tmp_path, "acme-codecs", "acme.plain", 240, version)):
        error, seconds = error_of(lambda: hc.Communicator(WORLD, "acme.plain", "dp", timeout=20.0))
    told = "rank 0 takes codecs of acme-codecs 1.0" in str(error) and "of acme-codecs 1.1" in str(error)
    verdict(isinstance(error, hc.MismatchError) and told, repr(error))
    assert seconds < 5


@pytest.mark.ranks(least=2)
def test_a_codec_of_a_call_that_one_rank_lacks(make, tmp_path):
    comm = make("none")
    x = gaussian(5000)
    with nullcontext() if last else installed(codec_package(tmp_path, "acme-codecs", "acme.plain", 240)):
        error, seconds = error_of(lambda: comm.Allreduce(x, np.empty_like(x), codec="acme.plain"))
    told = "acme.plain" in str(error) and (last or f"rank {LAST}" in str(error))
    verdict(isinstance(error, hc.UnknownCodecError if last else hc.RemoteError) and told, repr(error))
    assert seconds < 5


@pytest.mark.parametrize("n", [0, 1, 999, 70_001])
def test_sums_by_a_codec_of_another_package(make, tmp_path, n):
    with installed(EXAMPLE, install(tmp_path, "hybridcomp-example", "1.0", POINTS)):
        (tmp_path / "policy.toml").write_text(
            '[dp]\nall_reduce = "example.ternary:block=64"\nmin_bytes = 0\n'
        )
        for policy in ("example.ternary:block=64", tmp_path / "policy.toml"):
            comm = make(policy)
            for algorithm in ("direct", "ring", "one_shot", "halving", "example.star", None):
                recv = np.full(n, np.nan, np.float32)
                comm.Allreduce(gaussian(n), recv, algorithm=algorithm)
                verdict(identical(recv), f"different bits by {algorithm}")
                near = relative_error(recv, total(n)) < 0.8 or n < 60
                verdict(near, f"{algorithm}: {relative_error(recv, total(n))}")


@pytest.mark.ranks(least=2)
def test_an_algorithm_that_one_rank_lacks_is_named_on_all(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDCOMP_ALGORITHM", "all_reduce=example.star")
    info = install(tmp_path, "hybridcomp-example", "1.0", POINTS)
    with nullcontext() if last else installed(EXAMPLE, info):
        error, seconds = error_of(lambda: hc.Communicator(WORLD, "int8", "dp", timeout=20.0).Barrier())
    told = "example.star" in str(error) and (last or f"rank {LAST}" in str(error))
    verdict(isinstance(error, hc.ConfigError if last else hc.RemoteError) and told, repr(error))
    assert seconds < 5
