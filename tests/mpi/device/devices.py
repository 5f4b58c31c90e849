"""Helpers for tests of a device's memory: arrays on the device and in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import hybridcomp as hc
from hybridcomp.arrays import DType, as_dtype
from tests.cuda.common import host_array, to_device, to_host
from tests.mpi.conftest import WORLD, gaussian, identical, verdict

RANK, SIZE = WORLD.rank, WORLD.size
CODECS = ["none", "bf16", "int8", "topk:ratio=0.05"]


def values(n: int, dtype: str, rank: int = RANK, seed: int = 1) -> np.ndarray:
    """Return the storage of a rank's values."""
    x = gaussian(n, rank, seed)
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def both(storage: np.ndarray, dtype: str) -> tuple[Any, Any]:
    """Return the same values on the device and in host memory."""
    return to_device(storage, as_dtype(dtype)), host_array(storage.copy(), dtype)


def empty(n: int, dtype: str) -> tuple[Any, Any]:
    return both(np.full(n, 7, as_dtype(dtype).storage), dtype)


def agrees(device: Any, host: Any, what: str = "") -> None:
    """Assert that the device's bits are the host path's, on every rank."""
    got, want = to_host(device), np.asarray(hc.arrays.flatten(host).data)
    ok = got.tobytes() == want.tobytes()
    wrong = "" if ok else f"first at {np.flatnonzero(got.reshape(-1) != want.reshape(-1))[:5]}"
    verdict(ok, f"{what} {wrong}")


def sums_agree(codec: str, device: Any, host: Any, what: str = "") -> None:
    """Assert that a sum on the device has the host path's bits; MPI adds plain elements up in an order of its own."""
    if codec != "none":
        agrees(device, host, what)
        return
    dtype = hc.arrays.flatten(host).dtype
    got, want = (_floats(raw, dtype) for raw in (to_host(device), hc.arrays.flatten(host).data))
    good = bool(np.allclose(got.reshape(-1), want, rtol=0.02, atol=0.02))
    verdict(good and identical(to_host(device)), what)


def _floats(raw: np.ndarray, dtype: DType) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32) if dtype is DType.BFLOAT16 else raw
