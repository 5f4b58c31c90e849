"""``lossless``: exact for every dtype, near the entropy of Gaussian data, and safe with any frame."""

from __future__ import annotations

import importlib
import struct
import threading
from typing import Any

import numpy as np
import pytest
import zstandard

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import DType
from hybridcomp.codecs import lossless
from tests.codecs import common
from tests.codecs.common import Array
from tests.codecs.test_mpc import noise, smooth

DTYPES = [d.label for d in DType if d is not DType.BFLOAT16]
CHUNK = 131072
SIZES = [0, 1, 2, 63, 64, 65, 1000, 4099, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77]


def model_decode(msg: Array, dtype: np.dtype[Any], n: int) -> bytes:
    """Read a message with NumPy and the zstandard library, as the module's text says it."""
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    words = n * dtype.itemsize // width
    planes = -(-words // CHUNK) * width
    table = np.frombuffer(msg[32 : 32 + 4 * planes].tobytes(), "<u4")
    at, found = 32 + 4 * planes, []
    for entry in table:
        size = int(entry) & 0xFFFFFF
        stored = msg[at : at + size].tobytes()
        found.append(zstandard.ZstdDecompressor().decompress(stored) if entry >> 24 else stored)
        at += size
    assert at == msg.size
    chunks = []
    for c in range(planes // width):
        stack = np.stack([np.frombuffer(p, np.uint8) for p in found[c * width : (c + 1) * width]], axis=1)
        word = np.ascontiguousarray(stack).view(f"<u{width}").reshape(-1)
        if dtype.kind in "fc":
            word = word >> np.array(1, word.dtype) | word << np.array(8 * width - 1, word.dtype)
        chunks.append(word.tobytes())
    return b"".join(chunks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact(dtype):
    codec = hc.get_codec("lossless")
    for n in SIZES:
        for x in (noise(n, dtype), smooth(n, dtype)):
            msg = codec.encode(x)
            assert model_decode(msg, x.dtype, n) == x.tobytes()
            y = hc.decode(msg)
            assert y.dtype == x.dtype
            assert y.tobytes() == x.tobytes()
            assert msg.size <= codec.bound(n, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_chunks_of_several_kinds(dtype):
    codec = hc.get_codec("lossless:level=1")
    for n in (CHUNK - 1, 2 * CHUNK + 77):
        x = common.gaussian(n, dtype)
        x[n // 2 :] = 0
        common.check_round_trip(codec, x)
    common.check_isas_agree(codec, x)


@pytest.mark.parametrize("level", [1, 3, 9])
def test_near_the_entropy_of_gaussian_data(level):
    """The ratio is within 3 % of the most that any lossless codec can reach."""
    codec = hc.get_codec("lossless", level=level)
    for dtype, itemsize, ceiling in (
        ("float32", 4, 1.205),
        ("bfloat16", 2, 1.517),
        ("float16", 2, 1.18),
    ):
        size = codec.encode(common.gaussian(300_000, dtype)).shape[0]
        assert 300_000 * itemsize / size > 0.97 * ceiling


@pytest.mark.parametrize(
    ("x", "least"),
    [
        (np.sin(np.arange(200_000) * 1e-4).astype(np.float32), 1.7),
        (np.arange(200_000, dtype=np.int32) // 7, 6.0),
        (np.arange(200_000) % 3 == 0, 100.0),
        (np.zeros(200_000, np.complex128), 1000.0),
    ],
)
def test_data_with_patterns_compresses(x, least):
    assert x.nbytes / hc.get_codec("lossless").encode(x).size > least


def test_levels():
    x = np.sin(np.arange(200_000) * 1e-4).astype(np.float32)
    sizes = [hc.get_codec("lossless", level=level).encode(x).size for level in (1, 3, 19)]
    assert sizes[0] >= sizes[1] > sizes[2]
    assert hc.get_codec("lossless:7") == hc.get_codec("lossless", level=7)
    for bad in (0, -1, 23, 1.5, True, "3"):
        with pytest.raises(ValueError, match="level must be an integer from 1 to 22"):
            hc.get_codec("lossless", level=bad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_hardly_expands(dtype):
    x = noise(100_000, dtype)
    assert hc.get_codec("lossless").encode(x).size <= x.nbytes + 32 + 4 * x.itemsize


def test_sample_of_planes():
    """The counts of a sample's bytes tell which planes are worth compressing."""
    kernels = native.kernels()
    x = noise(5000, "uint32").copy()
    assert kernels.planes_compressible(x, 4, False) == 0
    x &= np.uint32(0xFF3FFF0F)  # byte 0 has 4 random bits, byte 2 six
    assert kernels.planes_compressible(x, 4, False) == 0b0101
    assert kernels.planes_compressible(x[:63], 4, False) == 0  # too few to tell
    assert kernels.planes_compressible(common.gaussian(5000), 4, True) == 0b1000
    assert kernels.planes_compressible(np.zeros(100, np.uint64), 8, True) == 0xFF


def test_threads_of_the_caller():
    """zstd's contexts are each thread's own."""
    codec = hc.get_codec("lossless")
    inputs = [common.gaussian(CHUNK + 5, seed=s) for s in range(4)]
    expected = [codec.encode(x).tobytes() for x in inputs]
    found: dict[int, bool] = {}

    def work(i: int) -> None:
        messages = [codec.encode(inputs[i]) for _ in range(4)]
        same = all(m.tobytes() == expected[i] for m in messages)
        found[i] = same and hc.decode(messages[0]).tobytes() == inputs[i].tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == dict.fromkeys(range(4), True)


# -- hostile bytes -----------------------------------------------------------------------------------------


def forged(planes: list[tuple[int, bytes]], n: int = 1000, dtype: DType = DType.UINT8) -> Array:
    """Return a message of these planes: kind and bytes."""
    table = b"".join(struct.pack("<I", kind << 24 | len(data)) for kind, data in planes)
    payload = table + b"".join(data for _, data in planes)
    msg = np.array(hc.get_codec("lossless").encode(np.zeros(0, dtype.storage)))
    msg = np.concatenate([msg[:32], np.frombuffer(payload, np.uint8)])
    msg[8:24] = np.frombuffer(struct.pack("<QQ", n, len(payload)), np.uint8)
    return common.reseal(msg)


def frame(data: bytes, **options: Any) -> bytes:
    """Return a zstd frame."""
    return zstandard.ZstdCompressor(**options).compress(data)


def test_forged_messages_that_are_good():
    good = bytes(1000)
    for kind, data in ((0, good), (1, frame(good)), (1, frame(good, write_checksum=True))):
        assert hc.decode(forged([(kind, data)])).tobytes() == good


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        (0, bytes(999), "999 bytes for 1000"),
        (0, bytes(1001), "1001 bytes for 1000"),
        (2, bytes(1000), "kind 2"),
        (255, bytes(1000), "kind 255"),
        (1, frame(bytes(999)), "has 999 bytes, not 1000"),
        (1, frame(bytes(1001)), "has 1001 bytes, not 1000"),
        (1, frame(bytes(10**7)), "has 10000000 bytes, not 1000"),
        (1, frame(bytes(1000), write_content_size=False), "plane 0"),
        (1, b"", "plane 0"),
        (1, b"\x28\xb5\x2f\xfd", "plane 0"),
        (1, bytes(100), "plane 0"),
        (1, frame(bytes(1000))[:-1], "payload"),
        (1, frame(bytes(1000)) + b"\0", "payload"),
        (1, frame(bytes(1000)) * 2, "payload"),
        (1, b"\x50\x2a\x4d\x18" + struct.pack("<I", 1000) + bytes(900), "payload"),  # a skippable frame
        (1, b"\x50\x2a\x4d\x18" + struct.pack("<I", 900) + bytes(900), "payload"),
    ],
)
def test_forged_planes(kind, data, why):
    msg = forged([(kind, data)])
    out = np.zeros(1000, np.uint8)
    with pytest.raises(hc.WireError, match=why):
        hc.decode(msg)
    with pytest.raises(hc.WireError, match=why):
        hc.decode(msg, out=out)


def test_frames_that_hold_less_than_they_say():
    """The content size of a frame's header is a claim: both ways of breaking it are found out."""
    data = np.random.default_rng(0).integers(0, 4, 1000, np.uint8).tobytes()
    for size in (996, 999, 1001, 1004, 1255):
        good = bytearray(frame(data[:size] if size < 1000 else data + data[: size - 1000]))
        at = good.index(struct.pack("<H", size - 256), 4)
        good[at : at + 2] = struct.pack("<H", 1000 - 256)
        with pytest.raises(hc.WireError, match="payload"):
            hc.decode(forged([(1, bytes(good))]))


def test_counts_beyond_the_payload():
    for n in (0, 1001, CHUNK, CHUNK + 1000, 2**40, 2**48):
        with pytest.raises(hc.WireError, match="malformed lossless"):
            hc.decode(forged([(1, frame(bytes(1000)))], n))


def test_without_the_library(monkeypatch):
    find = importlib.import_module

    def missing(name: str) -> Any:
        if "zst" in name:
            raise ImportError(f"No module named {name!r}")
        return find(name)

    msg = hc.get_codec("lossless").encode(np.zeros(1000, np.float32))
    lossless._zstandard.cache_clear()
    monkeypatch.setattr(lossless, "_local", threading.local())
    monkeypatch.setattr(importlib, "import_module", missing)
    try:
        with pytest.raises(hc.NativeUnavailableError, match="needs the zstandard library"):
            hc.get_codec("lossless").encode(np.zeros(1000, np.float32))
        with pytest.raises(hc.NativeUnavailableError, match="pip install zstandard"):
            hc.decode(msg)
    finally:
        lossless._zstandard.cache_clear()
