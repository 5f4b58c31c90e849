"""Tell what a reduce operation of torch's is, without MPI."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp


def op_kind(op: Any) -> Any:
    """Return the member of ``ReduceOp.RedOpType`` behind an option, an operation or None (SUM)."""
    if op is None:
        return ReduceOp.SUM
    if op.__class__ is not ReduceOp:
        op = getattr(op, "reduceOp", op)
    return getattr(op, "op", op)


def factor_of(op: Any) -> float | torch.Tensor:
    """Return the factor of a ``PREMUL_SUM``.

    Raises:
        NotImplementedError: the operation has no factor.
    """
    op = getattr(op, "reduceOp", op)
    factor = getattr(op, "factor", None)
    if op.__class__ is ReduceOp and not hasattr(ReduceOp, "factor"):  # before PyTorch 2.13; FSDP2 makes these
        factor = getattr(op, "__getstate__")()[1]  # noqa: B009  (torch has no type for it)
    if factor is None:
        raise NotImplementedError("hybridcomp needs PREMUL_SUM with its factor: ReduceOp.PREMUL_SUM(factor)")
    return factor  # type: ignore[no-any-return]
