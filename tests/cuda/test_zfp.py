"""``zfp`` on a device: its bytes at every rate, its values of any bits."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.device import Queue
from tests.codecs.common import FLOATS
from tests.cuda import common

LIMITS = {"float32": (11, 128), "float64": (14, 256)}  # bits of a block: fewest, most
SIZES = [n for n in common.SIZES if n != 4097 or common.ON_GPU]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rate", [7.25, 8, 16, 24])
def test_bytes_are_the_cpus(rate: float, dtype: str) -> None:
    codec = hc.get_codec("zfp", rate=rate)
    for n in [*SIZES, 3, 255, 257, 2051]:
        common.check(codec, common.values("gaussian", n, dtype), dtype, outputs=n < 200)
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 500, dtype), dtype, outputs=False)


@pytest.mark.parametrize("dtype", LIMITS)
def test_every_rate(dtype: str) -> None:
    least, most = LIMITS[dtype]
    kinds = ("gaussian", "sparse", "mixed", "not finite", "tiny")
    for bits in range(least, most + 1):
        x = common.values(kinds[bits % len(kinds)], 130 + 17 * bits % 250, dtype, seed=bits)
        if bits % 3 == 0:
            x = np.cumsum(x).astype(x.dtype)  # smooth: runs of planes
        common.check(hc.get_codec("zfp", rate=bits / 4), x, dtype, outputs=False)


@pytest.mark.parametrize("dtype", LIMITS)
def test_any_bits_decode(dtype: str) -> None:
    """All exponents, those that the scale makes denormal or zero among them, and runs cut off by the end."""
    rng = np.random.default_rng(3)
    least, most = LIMITS[dtype]
    for bits in {*range(least, most + 1, 7), 32, 64, most}:
        codec = hc.get_codec("zfp", rate=bits / 4)
        msg = codec.from_stream(rng.bytes(codec.bound(999, dtype) - 40), 999, dtype)
        out = common.to_device(np.zeros(999, dtype))
        hc.decode(common.to_device(msg), out=out)
        common.assert_same(common.to_host(out), hc.decode(msg), f"{bits} bits of {dtype}")


@pytest.mark.parametrize("dtype", LIMITS)
def test_small_exponents(dtype: str) -> None:
    """Integers where there is no power of two to multiply by; planes that end before a group of eight does."""
    info = np.finfo(dtype)
    mantissas = np.array([0.75, -0.5, 0.625, 0.5625, 0.5, 0.9, -0.99, 0.7])
    least = int(np.log2(info.smallest_subnormal))
    x = np.concatenate([np.ldexp(mantissas, e) for e in range(least, least + 160)]).astype(dtype)
    for rate in (8, 16, 29.75, LIMITS[dtype][1] / 4):
        common.check(hc.get_codec("zfp", rate=rate), x, dtype, outputs=False)


@pytest.mark.parametrize("rate", [7.25, 8, 16])
def test_unaligned_and_hostile(rate: float) -> None:
    codec = hc.get_codec("zfp", rate=rate)
    common.check_unaligned(codec, 333)
    common.check_hostile(codec, common.values("gaussian", 77, "float32"), "float32", flips=60)
    common.check_hostile(codec, common.values("gaussian", 37, "float64"), "float64", flips=30)


@pytest.mark.parametrize("spec", ["zfp:rate=7.25", "zfp:rate=8", "zfp:rate=16"])
def test_a_grid_of_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a grid of any size come to everything."""
    monkeypatch.setattr(Queue, "blocks", lambda self, items, per_block, waves=8: min(items, 1))
    common.check(hc.get_codec(spec), common.values("mixed", 5003, "float32"), "float32", outputs=False)
