"""Make MPI's reduction operators anew for floats, so that all ranks end with the same bits.

MPI's own keep, of two values of which neither is larger, the one that comes first: the larger of 1 and NaN, or of 0.0
and -0.0, is another on each rank where ranks reduce in another order, as each does in MPI's all-reduce of a short
array. Of the NaN that an addition results in, too, the operands' order decides some bits. The operators made here
compute what the compiled engine computes (``kernels/include/hybridcomp/fold.hpp``), which depends on no order.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import DType
from hybridcomp.collectives.algorithms.schedules import FOLDS
from hybridcomp.native import kernels
from hybridcomp.pmi.library import address

_FLOAT_AT, _DOUBLE_AT, _LONG_DOUBLE = 32, 33, 34

_NAMES: dict[int, str] = {
    MPI.SUM.handle: "sum",
    MPI.MAX.handle: "max",
    MPI.MIN.handle: "min",
    MPI.PROD.handle: "product",
    MPI.MAXLOC.handle: "max at",
    MPI.MINLOC.handle: "min at",
}
_KINDS: dict[int, int] = {
    datatype.handle: kind
    for kind, datatypes in {
        int(DType.FLOAT32): [MPI.FLOAT, MPI.REAL, MPI.REAL4],
        int(DType.FLOAT64): [MPI.DOUBLE, MPI.DOUBLE_PRECISION, MPI.REAL8],
        int(DType.COMPLEX64): [MPI.C_FLOAT_COMPLEX, MPI.CXX_FLOAT_COMPLEX, MPI.COMPLEX, MPI.COMPLEX8],
        int(DType.COMPLEX128): [
            MPI.C_DOUBLE_COMPLEX,
            MPI.CXX_DOUBLE_COMPLEX,
            MPI.DOUBLE_COMPLEX,
            MPI.COMPLEX16,
        ],
        _FLOAT_AT: [MPI.FLOAT_INT],
        _DOUBLE_AT: [MPI.DOUBLE_INT],
        _LONG_DOUBLE: [MPI.LONG_DOUBLE],
    }.items()
    for datatype in datatypes
    if datatype != MPI.DATATYPE_NULL
}
# Floats that are reduced by the engine in their own type; the sums of real ones it makes otherwise, as codecs do.
_EXTREMES = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
_PRODUCTS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128})
_SUMS = frozenset({DType.COMPLEX64, DType.COMPLEX128})
_ENGINES = {"max": _EXTREMES, "min": _EXTREMES, "product": _PRODUCTS, "sum": _SUMS}


def fold_of(op: Any, dtype: DType) -> str:
    """Return the name of the fold by which the engine all-reduces elements of a dtype; ``""`` if it has none."""
    name = _NAMES.get(op.handle, "") if isinstance(op, MPI.Op) else ""
    return name if dtype in _ENGINES.get(name, ()) else ""


def made_anew(op: MPI.Op, *, sums: bool = False) -> bool:
    """Tell whether an operator is one made here for some datatypes; for ``sums`` see :func:`same_on_all`."""
    name = _NAMES.get(op.handle)
    return name is not None and (sums or name != "sum")


def same_on_all(op: MPI.Op, datatype: MPI.Datatype | None, *, sums: bool = False) -> MPI.Op:
    """Return the operator by which MPI reduces: one made here for floats, else ``op`` itself.

    All ranks must ask alike: MPI's algorithms depend on whether an operator is its own.

    Args:
        op: operator of MPI, or the caller's own.
        datatype: datatype of the elements; None if it is not known.
        sums: whether ``MPI.SUM``, too, is one made here: where ranks add up the same elements each for itself.
    """
    kind = None if datatype is None else _KINDS.get(datatype.handle)
    made = _made(_NAMES[op.handle], kind) if kind is not None and made_anew(op, sums=sums) else None
    return made or op


@functools.cache
def _made(name: str, kind: int) -> MPI.Op | None:
    """Make an operator; None where MPI's own does not reduce the type either."""
    large = hasattr(ctypes.CDLL(MPI.__file__), "MPI_Op_create_c")
    function = kernels().mpi_reduction(FOLDS.index(name), kind, large)
    if not function:
        return None
    create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        address("MPI_Op_create_c" if large else "MPI_Op_create")
    )
    op = MPI.Op()
    code = create(function, 1, MPI._addressof(op))
    if code:
        raise MPI.Exception(code)
    return op
