"""``bounded`` on a device: codes of every kind, block by block, and the bounds that they are chosen by."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import as_dtype, flatten
from hybridcomp.device import Queue
from tests.codecs.common import FLOATS, reseal
from tests.cuda import common

SPECS = ["bounded", "bounded:abs=0.01", "bounded:rel=1e-6", "bounded:abs=1e-60"]
SIZES = [*common.SIZES, 63, 64, 65, 2047, 2048, 2049]
CODES = 48  # where a message's codes begin


def patchwork(n: int, dtype: str) -> Any:
    """Return blocks of every kind, in an order that puts each beside others; some lengths are no multiple of four."""
    rng = np.random.default_rng(n)
    x = np.empty(-(-n // 64) * 64)
    t = np.arange(64)
    kinds = [
        lambda s: np.zeros(64),
        lambda s: np.full(64, s),
        lambda s: np.full(64, 1e9 * s),
        lambda s: s * rng.standard_normal(64),
        lambda s: s * (1 + t / 1000),  # differences pay
        lambda s: s * (1 + (t > 40) * rng.standard_normal(64)),  # only those of the first 16 do
        lambda s: 1e9 * s * rng.standard_normal(64),  # too large for integers
        lambda s: np.where(t == 20, np.nan, s * t),
        lambda s: np.where(t % 2, 0.0, -0.0),
        lambda s: s * rng.integers(-2, 3, 64),
    ]
    for block in range(x.size // 64):
        kind = kinds[rng.integers(len(kinds))]
        x[64 * block : 64 * block + 64] = kind(10.0 ** rng.uniform(-3, 2))
    with np.errstate(over="ignore"):
        return common.values("zeros", 0, dtype) if not n else _as_storage(x[:n], dtype)


def _as_storage(x: Any, dtype: str) -> Any:
    if dtype != "bfloat16":
        return x.astype(dtype)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in SIZES:
        common.check(codec, common.values("gaussian", n, dtype), dtype, outputs=n < 200)
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 500, dtype), dtype, outputs=False)


@pytest.mark.parametrize("spec", SPECS[1:3])
def test_a_share_of_a_bound(spec: str) -> None:
    """Devices' messages of a reduction keep it, too."""
    codec = hc.get_codec(spec).sharing(Fraction(7, 3))
    common.check(codec, common.values("gaussian", 500, "float32"), "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("abs", [1e-3, 0.037, 2.0])
def test_blocks_of_every_kind(abs: float, dtype: str) -> None:
    x = patchwork(6300, dtype)
    codec = hc.get_codec("bounded", abs=abs)
    codes = np.asarray(codec.encode(common.host_array(x, dtype)))[CODES : CODES + 98]
    if abs == 0.037:
        assert {0, 64, 65} < set(codes)
        assert dtype != "float32" or any(32 <= code < 64 for code in codes)
    common.check(codec, x, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_number_of_planes(dtype: str) -> None:
    """Bounds go from those that keep everything to those that leave nothing."""
    noise = common.values("gaussian", 200, dtype)
    smooth = _as_storage(np.cumsum(np.full(200, 1.0)) + 1000, dtype)
    top = 38 if dtype != "float64" else 300
    for exponent in [*range(-12, 3), -top, -44, top]:
        codec = hc.get_codec("bounded", abs=3.7 * 10.0**exponent)
        common.check(codec, noise, dtype, outputs=False)
        common.check(codec, smooth, dtype, outputs=False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ranges(dtype: str) -> None:
    """Ranges of values that are not finite, denormal, as far apart as there are, at any place."""
    bits = {"float64": np.uint64, "float32": np.uint32}.get(dtype, np.uint16)
    rng = np.random.default_rng(7)
    for n in (1, 5, 300, 5000):
        everything = rng.integers(0, np.iinfo(bits).max, n, bits, endpoint=True)
        same = np.full(n, everything[0])
        denormal = everything & bits(0x7F if dtype == "bfloat16" else 0x3FF)
        nans = np.full(n, common.values("not finite", 3, dtype).view(bits)[1])
        for x in (everything, same, denormal, nans):
            for spec in ("bounded", "bounded:rel=1e300"):
                common.check(hc.get_codec(spec), x.view(_storage(dtype)), dtype, outputs=False)


def _storage(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def test_elements_kept_bit_for_bit() -> None:
    """Payloads of NaN are kept, too."""
    for dtype, bits in (("float32", np.uint32), ("float16", np.uint16), ("bfloat16", np.uint16)):
        quiet = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}[dtype]
        x = common.values("gaussian", 700, dtype)
        x.view(bits)[::50] |= bits(quiet + 5)
        codec = hc.get_codec("bounded:abs=0.01")
        out = common.to_device(np.zeros(700, x.dtype), hc.arrays.as_dtype(dtype))
        hc.decode(codec.encode(common.to_device(x, hc.arrays.as_dtype(dtype))), out=out)
        got = common.to_host(out)
        np.testing.assert_array_equal(got.view(bits)[::50], x.view(bits)[::50])


@pytest.mark.parametrize("spec", ["bounded", "bounded:abs=0.3"])
def test_unaligned_and_hostile(spec: str) -> None:
    codec = hc.get_codec(spec)
    common.check_unaligned(codec, 333)
    common.check_hostile(codec, common.values("gaussian", 277, "float32"), "float32", flips=60)
    common.check_hostile(codec, patchwork(2300, "float16"), "float16", flips=60)


def message(kind: str, n: int, dtype: str) -> Any:
    storage = common.values(kind, n, dtype)
    return np.array(flatten(hc.get_codec("bounded").encode(common.host_array(storage, dtype))).data)


@pytest.mark.parametrize("dtype", FLOATS)
def test_hostile_codes(dtype: str) -> None:
    """Every code, in the first block, the last, short one, and one that begins another chunk."""
    n = 2048 + 150
    msg = message("gaussian", n, dtype)
    out = common.to_device(np.zeros(n, np.float32))
    for code in range(256):
        planes = 8 * code if code < 32 else 4 + 8 * (code - 32)
        for block, elements in ((0, 64), (32, 64), (34, 22)):
            bad = msg.copy()
            bad[CODES + block] = code
            if code == msg[CODES + block]:
                continue
            saves = code == 0 or planes < elements * as_dtype(dtype).itemsize
            told = "length" if code in (64, 65) or (code < 64 and saves) else "unknown code"
            with pytest.raises(hc.WireError, match=told):
                hc.decode(reseal(bad), out=np.zeros(n, np.float32))
            with pytest.raises(hc.WireError, match=told):
                hc.decode(common.to_device(reseal(bad)), out=out)
    assert not common.to_host(out).any(), "a faulty message was decoded"


@pytest.mark.parametrize("code", [16, 31, 48, 63])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blocks_of_more_bytes_than_their_elements_are_refused(dtype: str, code: int) -> None:
    """A thread block has memory for as many bytes as the elements of a chunk have, and no more."""
    n, planes = 2048, 8 * code if code < 32 else 4 + 8 * (code - 32)
    head = message("zeros", n, dtype)[:CODES]
    bad = np.concatenate([head, np.full(32, code, np.uint8), np.ones(32 * planes, np.uint8)])
    bad[16:24] = np.array([bad.size - 32], np.uint64).view(np.uint8)
    with pytest.raises(hc.WireError, match="unknown code"):
        hc.decode(reseal(bad), out=np.zeros(n, np.float32))
    with pytest.raises(hc.WireError, match="unknown code"):
        hc.decode(common.to_device(reseal(bad)), out=common.to_device(np.zeros(n, np.float32)))


@pytest.mark.parametrize("spec", ["bounded", "bounded:abs=0.02"])
def test_a_grid_of_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a grid of any size come to everything."""
    monkeypatch.setattr(Queue, "blocks", lambda self, items, per_block, waves=8: min(items, 1))
    common.check(hc.get_codec(spec), common.values("mixed", 18509, "float32"), "float32", outputs=False)


@pytest.mark.parametrize("n", [1, 8191, 8192, 17_000])
def test_starts(n: int) -> None:
    """The scan finds the starts of more chunks than it takes at a time."""
    queue = Queue(common.runtime(), 0)
    sizes = np.random.default_rng(n).integers(0, 16385, n, np.uint32)
    sums, starts = queue.array(n, np.uint32), queue.array(n, np.uint64)
    queue.write(sums, sizes)
    ends = 1000 + np.cumsum(sizes, dtype=np.uint64)
    for off, found in ((0, 0), (1, 1)):
        status, total = queue.zeros(4).view(np.uint32), queue.array(1, np.uint64)
        queue.launch(
            "bounded", "bounded_starts", 1, 1024, sums, n, 1000, starts, int(ends[-1]) + off, total, status
        )
        np.testing.assert_array_equal(queue.read(starts), ends - sizes)
        assert queue.read(total)[0] == ends[-1]
        assert queue.read(status)[0] == found
