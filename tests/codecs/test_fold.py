"""Elements of two ranks made one: NaN spreads, +0 is above -0, and no order, alignment or instruction set shows."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest

from hybridcomp import native
from hybridcomp.arrays import DType
from hybridcomp.collectives.execution.mpi_ops import FOLDS
from tests.codecs.common import isa, isas, with_specials

REAL = {"float32": DType.FLOAT32, "float64": DType.FLOAT64}
COMPLEX = {"complex64": DType.COMPLEX64, "complex128": DType.COMPLEX128}
SIZES = [0, 1, 2, 7, 16, 33, 1000]
AT = {"float32": 32, "float64": 33}  # a float with an index


def fold(name: str, kind: int, into: np.ndarray, other: np.ndarray, offset: int = 0) -> np.ndarray:
    """Return ``into`` folded with another array, by the function that MPI calls; ``offset`` bytes off alignment."""
    function = native.kernels().mpi_reduction(FOLDS.index(name), kind, True)
    assert function
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        function
    )
    rooms = [np.frombuffer(bytearray(x.nbytes + offset), np.uint8)[offset:] for x in (other, into)]
    for room, x in zip(rooms, (other, into), strict=True):
        room[:] = x.view(np.uint8)
    n = ctypes.c_int64(into.size)
    call(rooms[0].ctypes.data, rooms[1].ctypes.data, ctypes.addressof(n), None)
    return np.array(rooms[1]).view(into.dtype)


def values(n: int, dtype: str, seed: int) -> np.ndarray:
    parts = 2 if dtype.startswith("complex") else 1
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    x = np.random.default_rng(seed).standard_normal(parts * n).astype(real)
    return with_specials(x, seed, share=0.5).view(dtype)


def expected(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name in ("sum", "product"):
            if a.dtype.kind == "c":
                real = np.dtype(f"f{a.itemsize // 2}")
                x, y = (v.view(real).reshape(-1, 2).T for v in (a, b))
                parts = [x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]]
                both = x + y if name == "sum" else np.array(parts, real)
                return canonical(np.ascontiguousarray(both.T).reshape(-1)).view(a.dtype)
            return canonical(a + b if name == "sum" else a * b)
        larger = (a > b) | ((a == b) & ~np.signbit(a))
        found = np.where(larger == (name == "max"), a, b)
        return canonical(np.where(np.isnan(a) | np.isnan(b), np.array(np.nan, a.dtype), found))


def canonical(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX])
def test_folds_of_floats(dtype):
    names = ("max", "min", "sum", "product") if dtype in REAL else ("sum", "product")
    kind = (REAL | COMPLEX)[dtype]
    for name, n in itertools.product(names, SIZES):
        a, b = values(n, dtype, 1), values(n, dtype, 2)
        want = expected(name, a, b)
        for one in isas():
            with isa(one):
                for x, y, offset in ((a, b, 0), (b, a, 0), (a, b, 1)):
                    got = fold(name, kind, x, y, offset)
                    assert got.tobytes() == want.tobytes(), (name, n, one, offset)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("dtype", list(REAL))
def test_larger_of_denormals_and_zeros(dtype, name):
    tiny = np.nextafter(np.array(0, dtype), np.array(1, dtype))
    line = np.array([-np.inf, -1, -2 * tiny, -tiny, -0.0, 0.0, tiny, 2 * tiny, 1, np.inf], dtype)
    a, b = (np.ravel(x).copy() for x in np.meshgrid(line, line))
    i, j = (np.ravel(x) for x in np.meshgrid(np.arange(line.size), np.arange(line.size)))
    want = line[np.maximum(i, j) if name == "max" else np.minimum(i, j)]
    for one in isas():
        with isa(one):
            assert fold(name, REAL[dtype], a, b).tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", list(AT))
def test_place_of_the_largest(dtype):
    kind: Any = np.dtype([("value", dtype), ("index", np.int32)], align=True)
    nan = np.nan
    cases = [  # value and index of two, and of the larger and the smaller
        ((1, 5), (2, 3), (2, 3), (1, 5)),
        ((1, 5), (1, 3), (1, 3), (1, 3)),
        ((nan, 5), (2, 3), (nan, 5), (nan, 5)),
        ((2, 3), (nan, 5), (nan, 5), (nan, 5)),
        ((-nan, 5), (nan, 3), (nan, 3), (nan, 3)),
        ((0.0, 5), (-0.0, 3), (0.0, 5), (-0.0, 3)),
        ((nan, 1), (np.inf, 0), (nan, 1), (nan, 1)),
    ]
    for at, name in ((2, "max at"), (3, "min at")):
        a, b, want = (np.array([case[k] for case in cases], kind) for k in (0, 1, at))
        for x, y in ((a, b), (b, a)):
            got = fold(name, AT[dtype], x, y)
            assert got["index"].tolist() == want["index"].tolist()
            assert got["value"].tobytes() == want["value"].tobytes()


def test_long_doubles():
    a = np.array([1, np.nan, 0.0, -0.0, np.inf, 2], np.longdouble)
    b = np.array([2, 1, -0.0, 0.0, -np.inf, np.nan], np.longdouble)
    for x, y in ((a, b), (b, a)):
        got = fold("max", 34, x, y)
        np.testing.assert_array_equal(got, np.array([2, np.nan, 0, 0, np.inf, np.nan], np.longdouble))
        assert not np.signbit(got[2:4]).any()
        assert np.signbit(fold("min", 34, x, y)[2:4]).all()
        np.testing.assert_array_equal(fold("sum", 34, x, y)[[0, 1, 4]], np.array([3, np.nan, np.nan]))


def test_what_is_not_folded():
    module = native.kernels()
    for name, kind in (("or", DType.FLOAT32), ("max", DType.COMPLEX64), ("max at", DType.FLOAT64)):
        assert module.mpi_reduction(FOLDS.index(name), kind, True) == 0
    with pytest.raises(ValueError, match="no such fold"):
        module.mpi_reduction(len(FOLDS), DType.FLOAT32, True)
