"""Tensors that a communicator takes as they are; CUDA ones are stood in for, since CI has no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.errors import CudaUnavailableError
from hybridcomp.torch import staging
from hybridcomp.torch.streams import CallerStreams


def on_cuda(*, contiguous: bool = True) -> Any:
    return SimpleNamespace(
        device=torch.device("cuda", 0),
        is_contiguous=lambda: contiguous,
        is_conj=lambda: False,
        is_neg=lambda: False,
    )


def test_cuda_tensors_go_straight_to_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.cuda, "runtime_of", lambda ordinal: object())
    staging._runs_kernels.cache_clear()
    assert staging.home(on_cuda()) == torch.device("cuda", 0)
    assert staging.usable(on_cuda())
    assert not staging.usable(on_cuda(contiguous=False))
    staging._runs_kernels.cache_clear()


def test_cuda_tensors_go_through_host_memory_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(ordinal: int) -> Any:
        raise CudaUnavailableError("CuPy is not installed")

    monkeypatch.setattr(staging.cuda, "runtime_of", missing)
    staging._runs_kernels.cache_clear()
    with pytest.warns(UserWarning, match="cuda:0 are copied to host memory .* CuPy is not installed"):
        assert staging.home(on_cuda()) == torch.device("cpu")
    assert not staging.usable(on_cuda())  # and says so once
    staging._runs_kernels.cache_clear()


def test_host_tensors_are_used_as_they_are_where_that_is_possible() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert staging.source(x).data_ptr() == x.data_ptr()
    assert staging.source(x.t()).is_contiguous()
    target = staging.Target(x.t())
    target.data.copy_(torch.ones(3, 2))
    target.commit()
    assert x.eq(1).all()


def test_streams_of_host_tensors_are_none() -> None:
    streams = CallerStreams([torch.ones(2)])
    with streams.current():
        streams.mark()
    streams.join()
