"""Peers of the collectives: MPI's own and those of torch's gloo, on the same ranks and the same data."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Callable
from typing import Any

PEERS = ("mpi", "gloo")
Run = Callable[[], Any]


def missing(peer: str, dtype: str) -> str | None:
    """Return why a peer cannot be used here, for elements of this type; None if it can."""
    if peer == "mpi" and dtype == "bfloat16":
        return "MPICH sums no bfloat16 (--peer gloo does)"
    if peer == "gloo" and importlib.util.find_spec("torch") is None:
        return "gloo is torch's, and torch is not installed"
    return None


def gloo(timeout: float) -> Any:
    """Return ``torch.distributed`` with a gloo group of all MPI ranks, which meet over MPI."""
    import torch.distributed as dist  # noqa: PLC0415

    import hybridcomp.torch  # noqa: F401, PLC0415  (the rendezvous)

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    return dist


def close() -> None:
    """End gloo's group, if there is one."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()
