"""The GPU's runtime over a stand-in for CuPy, whose kernels the emulation runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import cuda
from hybridcomp.arrays import flatten
from hybridcomp.device import Queue
from tests.cuda import common, fake_cupy
from tests.emulation.runtime import EmulatedArray, emulated

pytestmark = pytest.mark.skipif(common.ON_GPU, reason="the real CuPy is under test there")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = fake_cupy.make(emulated())
    monkeypatch.setitem(sys.modules, "cupy", module)
    cuda._cupy.cache_clear()
    cuda.runtime_of.cache_clear()
    yield module
    cuda._cupy.cache_clear()
    cuda.runtime_of.cache_clear()


def on_device(fake: Any, values: np.ndarray) -> EmulatedArray:
    made = fake.empty(values.size, values.dtype)
    made._view[:] = values
    return made


@pytest.mark.parametrize(
    "spec", ["lattice", "bf16", "none", "int8", "sign", "zfp:rate=8", "topk:ratio=0.05", "bounded", "mpc"]
)
def test_codecs(fake: Any, spec: str) -> None:
    codec = hc.get_codec(spec)
    x = common.values("gaussian", 1500, "float32")
    message = codec.encode(on_device(fake, x))
    common.assert_same(common.to_host(message), codec.encode(x), spec)
    out = on_device(fake, np.zeros_like(x))
    hc.decode(message, out=out)
    common.assert_same(common.to_host(out), hc.decode(codec.encode(x)), spec)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_products(fake: Any, transposed: bool) -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (7, 3)))
    given = np.ascontiguousarray(a.T) if transposed else a
    queue = Queue(cuda.runtime_of(0), 0)
    left, right = (flatten(on_device(fake, m.reshape(-1)), device=True).data for m in (given, b))
    out = queue.array(15, np.float32)
    queue.matmul(left, right, out, (5, 7, 3), transposed=transposed)
    np.testing.assert_allclose(queue.read(out).reshape(5, 3), a @ b, rtol=1e-5)
    assert fake.cuda.cublas.getMathMode(1) == 99, "the caller's mode is back"
    queue.matmul(left[:0], right, out[:0], (0, 7, 3))  # an empty product


def test_streams_events_and_pinned_memory(fake: Any) -> None:
    runtime = cuda.runtime_of(0)
    queue = Queue(runtime, runtime.new_stream()[0])
    x = flatten(on_device(fake, np.arange(100, dtype=np.float32)), device=True).data
    copy = queue.array(100, np.float32)
    queue.copy(copy, x)
    event = runtime.record(queue.stream)
    assert not event.done()
    other = Queue(runtime, runtime.new_stream()[0])
    runtime.follow(other.stream, event)
    pinned = runtime.pinned(400)
    runtime.copy(pinned.ctypes.data, copy.ptr, 400, other.stream)
    runtime.record(other.stream).wait()
    np.testing.assert_array_equal(pinned.view(np.float32), np.arange(100, dtype=np.float32))
    assert event.done()
    assert not np.any(other.read(other.zeros(64)))
