"""``lossless`` on a device: by the host's zstd the CPU's bytes, by nvCOMP bytes that the CPU reads."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import zstandard

import hybridcomp as hc
from hybridcomp import nvcomp
from hybridcomp.arrays import DType, as_dtype
from hybridcomp.codecs.device.messages import HEAD_BYTES
from hybridcomp.codecs.lossless import CHUNK, plane_count
from hybridcomp.wire import HEADER_BYTES
from tests.codecs.common import FLOATS, reseal
from tests.cuda import common
from tests.cuda.fake_nvcomp import Nvcomp

SPECS = ["lossless", "lossless:level=1"]
SIZES = [0, 1, 3, 63, 64, 65, 1000, 1023, 1025, 4097, 5000]
OTHERS = [d.label for d in DType if not d.is_float]


@pytest.fixture(autouse=True)
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the host's zstd, but for tests that say otherwise."""
    monkeypatch.setenv("HYBRIDCOMP_NVCOMP", "off")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Nvcomp:
    return use(monkeypatch, Nvcomp())


def use(monkeypatch: pytest.MonkeyPatch, library: Nvcomp) -> Nvcomp:
    if common.ON_GPU:
        pytest.skip("the fake knows the emulation's memory only")
    monkeypatch.setenv("HYBRIDCOMP_NVCOMP", "trust")
    monkeypatch.setattr(nvcomp, "library", lambda: library)
    monkeypatch.setattr(nvcomp, "serves", lambda runtime: runtime is common.runtime())
    monkeypatch.setattr(nvcomp, "_local", type("Local", (), {})())  # no codecs of another library
    return library


def numbers(n: int, dtype: str) -> Any:
    """Return data of which some planes shrink and some do not."""
    if as_dtype(dtype).is_float:
        return common.values("gaussian", n, dtype)
    rng = np.random.default_rng(n)
    kind = as_dtype(dtype)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.component_bytes]
    count = n * kind.itemsize // kind.component_bytes
    words = rng.integers(0, 4, count).astype(bits) << np.array(bits().itemsize * 8 - 3, bits)
    words |= rng.integers(0, 20, count).astype(bits)
    if kind is DType.BOOL:
        words &= 1
    return words.view(kind.storage)


def check_exact(codec: Any, data: Any, dtype: str, *, same: bool) -> None:
    """Check that a message comes back bit for bit, on the device and on the CPU; it is the CPU's if ``same``."""
    kind = as_dtype(dtype)
    want = np.array(common.flatten(codec.encode(common.host_array(data, dtype))).data)
    got = common.to_host(codec.encode(common.to_device(data, kind)))
    if same:
        common.assert_same(got, want, f"{codec.spec}: {data.size} {dtype}")
    for msg in (got, want):
        out = np.zeros(data.size, data.dtype)
        hc.decode(msg, out=common.host_array(out, dtype))
        assert out.tobytes() == data.tobytes()
        there = common.to_device(np.zeros(data.size, data.dtype), kind)
        hc.decode(common.to_device(msg), out=there)
        assert common.to_host(there).tobytes() == data.tobytes()


# -- the host's zstd -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in SIZES if spec == "lossless" else [1000]:
        common.check(codec, numbers(n, dtype), dtype, outputs=n == 1025)
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 700, dtype), dtype, outputs=False)


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_types(dtype: str) -> None:
    for n in (0, 1, 65, 1500):
        check_exact(hc.get_codec("lossless"), numbers(n, dtype), dtype, same=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_many_chunks(dtype: str) -> None:
    for n in (CHUNK, 2 * CHUNK + 77):
        check_exact(hc.get_codec("lossless"), numbers(n, dtype), dtype, same=True)


def test_unaligned() -> None:
    common.check_unaligned(hc.get_codec("lossless"), 1333)
    data = numbers(777, "int8")
    got = hc.get_codec("lossless").encode(common.to_device(data, offset=3))
    common.assert_same(common.to_host(got), hc.get_codec("lossless").encode(data), "bytes at 3")


@pytest.mark.parametrize("n", [77, 1333])
def test_hostile(n: int) -> None:
    common.check_hostile(hc.get_codec("lossless"), common.values("sparse", n, "float32"), "float32", flips=60)


def test_a_table_that_the_host_does_not_see_at_once() -> None:
    """The table has more planes than the head of a payload shows."""
    data = numbers(4 * CHUNK + 5, "float64")
    msg = hc.get_codec("lossless").encode(data)
    last = plane_count(data.size, DType.FLOAT64) - 1
    entry = slice(HEADER_BYTES + 4 * last, HEADER_BYTES + 4 * last + 4)
    assert entry.stop > HEAD_BYTES
    for change in (1, 1 << 24, 1 << 25):
        bad = msg.copy()
        bad[entry] = (bad[entry].view("<u4") ^ change).view(np.uint8)
        with pytest.raises(hc.WireError, match="lossless"):
            hc.decode(common.to_device(reseal(bad)))


# -- nvCOMP ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "int32", "complex128"])
def test_nvcomp_writes_what_the_cpu_reads(dtype: str, fake: Nvcomp) -> None:
    for n in (0, 1, 70, 1500):
        check_exact(hc.get_codec("lossless"), numbers(n, dtype), dtype, same=False)
    assert {"encode", "decode"} <= set(fake.calls)
    assert len(fake.codecs) == 1


def test_nvcomp_on_many_chunks(fake: Nvcomp) -> None:
    data = numbers(2 * CHUNK + 77, "float32")
    check_exact(hc.get_codec("lossless"), data, "float32", same=False)
    msg = common.to_host(hc.get_codec("lossless").encode(common.to_device(data)))
    assert msg.nbytes < 0.9 * data.nbytes
    acc = common.to_device(np.ones(data.size, np.float32))
    hc.decode_add(common.to_device(msg), acc)
    np.testing.assert_array_equal(common.to_host(acc), data + np.float32(1))


def test_nvcomp_and_hostile_messages(fake: Nvcomp) -> None:
    common.check_hostile(
        hc.get_codec("lossless"), common.values("sparse", 400, "float32"), "float32", flips=60
    )


@pytest.mark.parametrize("broken", ["no size", "raises", "short"])
def test_nvcomp_may_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame without its content's size is not sent; what is not decompressed well, the host decompresses."""
    use(monkeypatch, Nvcomp(broken))
    data = numbers(1500, "float32")
    check_exact(hc.get_codec("lossless"), data, "float32", same=False)
    msg = common.to_host(hc.get_codec("lossless").encode(common.to_device(data)))
    assert (msg.size < data.nbytes) == (broken != "no size")


def test_frames_beyond_nvcomp_go_to_the_host(fake: Nvcomp) -> None:
    """A frame with a checksum, which nvCOMP would not look at, goes to the host."""
    data = np.zeros(500, np.int8)
    frame = np.frombuffer(zstandard.ZstdCompressor(write_checksum=True).compress(data.tobytes()), np.uint8)
    msg = np.zeros(36 + frame.size, np.uint8)
    msg[:32] = hc.get_codec("lossless").encode(data)[:32]
    msg[16:24] = np.frombuffer((4 + frame.size).to_bytes(8, "little"), np.uint8)
    msg[32:36] = np.frombuffer((1 << 24 | frame.size).to_bytes(4, "little"), np.uint8)
    msg[36:] = frame
    assert np.array_equal(common.to_host(hc.decode(common.to_device(reseal(msg)))), data)
    assert fake.calls == []
    msg[-1] ^= 1
    with pytest.raises(hc.WireError):
        hc.decode(common.to_device(reseal(msg)))


def test_uses(fake: Nvcomp, monkeypatch: pytest.MonkeyPatch) -> None:
    data = numbers(1500, "float32")
    monkeypatch.setenv("HYBRIDCOMP_NVCOMP", "encode")
    check_exact(hc.get_codec("lossless"), data, "float32", same=False)
    assert set(fake.calls) == {"encode"}
    monkeypatch.setenv("HYBRIDCOMP_NVCOMP", "perhaps")
    with pytest.raises(ValueError, match="HYBRIDCOMP_NVCOMP is 'perhaps'; allowed: encode, trust"):
        hc.get_codec("lossless").encode(common.to_device(data))


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.import_module

    def absent(name: str) -> Any:
        if "nvcomp" in name:
            raise ImportError(f"No module named {name!r}")
        return find(name)

    monkeypatch.setenv("HYBRIDCOMP_NVCOMP", "trust")
    monkeypatch.setattr(importlib, "import_module", absent)
    nvcomp.library.cache_clear()
    try:
        assert not nvcomp.compresses(common.runtime())
        assert not nvcomp.decompresses(common.runtime())
        with pytest.raises(hc.CudaUnavailableError, match="pip install nvidia-nvcomp-cu12"):
            nvcomp.library()
    finally:
        nvcomp.library.cache_clear()


@pytest.mark.skipif(not common.ON_GPU, reason="nvCOMP needs a GPU")
@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "int64", "complex128"])
def test_nvcomp_itself(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDCOMP_NVCOMP", "trust")
    if not nvcomp.serves(common.runtime()):
        pytest.skip("nvCOMP is not installed")
    for n in (0, 1, 70, 1500, CHUNK, 3 * CHUNK + 77):
        check_exact(hc.get_codec("lossless"), numbers(n, dtype), dtype, same=False)
    data = np.zeros(CHUNK, np.float32)
    msg = common.to_host(hc.get_codec("lossless").encode(common.to_device(data)))
    assert msg.size < data.nbytes / 20  # its frames tell their contents' sizes, so that they are used
