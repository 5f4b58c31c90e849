"""Flat views and dtypes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp import arrays
from hybridcomp.arrays import DType, as_dtype, flatten


def test_dtype_codes_never_change():
    assert {d.label: int(d) for d in DType} == {
        "float32": 1,
        "float64": 2,
        "float16": 3,
        "bfloat16": 4,
        "uint8": 5,
        "int8": 6,
        "int16": 7,
        "int32": 8,
        "int64": 9,
        "bool": 10,
        "uint16": 11,
        "uint32": 12,
        "uint64": 13,
        "complex64": 14,
        "complex128": 15,
    }


@pytest.mark.parametrize("dtype", list(DType))
def test_every_spelling_of_a_dtype(dtype):
    assert as_dtype(dtype) is as_dtype(dtype.label) is as_dtype(getattr(torch, dtype.label)) is dtype
    if dtype is not DType.BFLOAT16:
        assert as_dtype(np.dtype(dtype.label)) is dtype
    assert dtype.itemsize == getattr(torch, dtype.label).itemsize
    assert dtype.is_float == (getattr(torch, dtype.label).is_floating_point)


def test_python_and_numpy_types():
    assert as_dtype(float) is DType.FLOAT64
    assert as_dtype(np.float32) is DType.FLOAT32
    for unknown in ("float8", object, np.dtype("U3"), None.__class__):
        with pytest.raises(hc.CodecMismatchError, match="cannot be carried"):
            as_dtype(unknown)


def test_accumulators():
    assert (
        DType.BFLOAT16.accumulator is DType.FLOAT16.accumulator is DType.FLOAT32.accumulator is DType.FLOAT32
    )
    assert DType.FLOAT64.accumulator is DType.FLOAT64
    assert DType.INT8.accumulator is DType.INT8


def test_flatten_shares_memory_where_it_can():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    flat = flatten(x)
    assert (flat.size, flat.nbytes, flat.shape, flat.shares, flat.is_torch) == (12, 48, (3, 4), True, False)
    assert np.shares_memory(flat.data, x)
    strided = flatten(x[:, ::2])
    assert not strided.shares
    np.testing.assert_array_equal(strided.data, [0, 2, 4, 6, 8, 10])
    np.testing.assert_array_equal(flatten(x.T).data, x.T.ravel())
    assert flatten(np.float32(3)).shape == ()
    assert flatten([1.0, 2.0]).dtype is DType.FLOAT64
    assert flatten(np.zeros((0, 5))).size == 0


def test_flatten_torch():
    t = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    flat = flatten(t)
    assert flat.dtype is DType.BFLOAT16
    assert flat.data.dtype == np.uint16
    assert flat.is_torch
    assert flat.shares
    flat.data[0] = 0x3F80
    assert t[0, 0] == 1
    assert not flatten(t.t()).shares
    assert flatten(torch.empty(0, 3)).shape == (0, 3)
    assert flatten(torch.tensor(2.0)).shape == ()
    assert flatten(torch.ones(3, requires_grad=True)).size == 3
    z = torch.tensor([1 + 2j])
    np.testing.assert_array_equal(flatten(z.conj()).data, [1 - 2j])
    np.testing.assert_array_equal(flatten(z.conj().imag).data, [-2])


def test_writable():
    x = np.zeros(4, np.float32)
    assert np.shares_memory(flatten(x, writable=True).data, x)
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    for wrong in (read_only, np.zeros((4, 4))[:, 1], [0.0, 1.0], 3.0):
        with pytest.raises(hc.CodecMismatchError, match="writable"):
            flatten(wrong, writable=True)
    with pytest.raises(hc.CodecMismatchError, match="contiguous"):
        flatten(torch.zeros(4, 4).t(), writable=True)


def test_device_arrays_are_refused():
    class Device:
        __cuda_array_interface__ = None

    with pytest.raises(hc.CudaUnavailableError):
        flatten(Device())
    with pytest.raises(hc.CudaUnavailableError):
        flatten(torch.empty(3, device="meta"))


def test_byte_view():
    x = np.arange(3, dtype=np.uint16)
    arrays.byte_view(x)[0] = 7
    assert x[0] == 7


def test_bfloat16_comes_back_without_torch():
    """It comes as ml_dtypes.bfloat16 where that is installed, else as its bits; never by importing torch."""
    code = """
import sys, numpy as np, hybridcomp as hc
from hybridcomp.arrays import DType, Flat
bits = np.array([0x3F80, 0xC000], np.uint16)
codec = hc.get_codec("none")
out = np.empty(codec.bound(2, "bfloat16"), np.uint8)
codec.encode_flat(Flat(bits, DType.BFLOAT16, (2,), True, False), out)
y = hc.decode(out)
assert y.dtype.name in ("bfloat16", "uint16"), y.dtype
assert y.view(np.uint16).tolist() == bits.tolist()
wide = np.empty(2, np.float32)
hc.decode(out, out=wide)
assert wide.tolist() == [1.0, -2.0]
assert "torch" not in sys.modules
"""
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr


def test_foreign_byte_order_is_refused():
    for dtype in (">f4", ">i8", ">f8"):
        with pytest.raises(hc.CodecMismatchError, match="cannot be carried"):
            hc.get_codec("none").encode(np.zeros(3, dtype))
