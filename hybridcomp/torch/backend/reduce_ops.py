"""Translate torch's reduce operations to MPI's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from hybridcomp.torch.backend.op_kinds import factor_of, op_kind

_ARITHMETIC: dict[Any, MPI.Op | str] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
}
_BITWISE: dict[Any, MPI.Op] = {ReduceOp.BAND: MPI.BAND, ReduceOp.BOR: MPI.BOR, ReduceOp.BXOR: MPI.BXOR}
# On booleans a sum is "any", a product "all", as torch's own arithmetic has it.
_LOGICAL: dict[Any, MPI.Op] = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BXOR: MPI.LXOR,
}
_INTEGERS = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_COMPLEX = {torch.complex64, torch.complex128}
_OF_COMPLEX = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
# Eight bits hold no sum on its way: these are reduced in float32, and rounded once.
_NARROW = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
}
# Integer types whose averages torch can divide; averages are truncated, as NCCL does.
_DIVIDED = _INTEGERS - {torch.uint16, torch.uint32, torch.uint64}


class Reduction(NamedTuple):
    """The way to reduce tensors of one dtype.

    Attributes:
        op: operation of the communicator.
        factor: factor by which every rank's values are multiplied first (``PREMUL_SUM``); None leaves them.
        dtype: dtype to reduce in; None is the tensors' own.
        truncates: whether to divide the sum by the number of ranks and truncate the quotient.
        plain: whether the communicator's operation on the tensors' own memory suffices.
    """

    op: MPI.Op | str
    factor: float | torch.Tensor | None = None
    dtype: torch.dtype | None = None
    truncates: bool = False
    plain: bool = False


_known: dict[tuple[int, torch.dtype], Reduction] = {}


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Look up a reduce operation.

    Args:
        op: a ``ReduceOp`` or one of its members; None is SUM.
        dtype: dtype of the tensors.

    Raises:
        NotImplementedError: the operation cannot reduce the dtype; names both.
    """
    given = op.__class__
    kind = op.op if given is ReduceOp else op_kind(op)
    known = _known.get((int(kind), dtype))
    if known is not None:
        return known
    wide = torch.float32 if dtype in _NARROW else None
    if kind == ReduceOp.PREMUL_SUM and dtype in _FLOATS | _NARROW | _COMPLEX:
        return Reduction(MPI.SUM, factor=factor_of(op), dtype=wide)
    known = _known[int(kind), dtype] = _reduction(kind, dtype, wide)
    return known


def _reduction(kind: Any, dtype: torch.dtype, wide: torch.dtype | None) -> Reduction:
    if kind == ReduceOp.AVG and dtype in _DIVIDED:
        return Reduction(MPI.SUM, truncates=True)
    found: MPI.Op | str | None = None
    if dtype in _FLOATS | _NARROW or (dtype in _COMPLEX and kind in _OF_COMPLEX):
        found = _ARITHMETIC.get(kind)
    elif dtype in _INTEGERS:
        found = {**_ARITHMETIC, **_BITWISE}.get(kind) if kind != ReduceOp.AVG else None
    elif dtype is torch.bool:
        found = _LOGICAL.get(kind)
    if found is None:
        raise NotImplementedError(f"hybridcomp cannot reduce {dtype} tensors by {kind}")
    return Reduction(found, dtype=wide, plain=wide is None)
