"""sign against a NumPy model."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from tests.codecs import common


def model(x: np.ndarray, block: int) -> tuple[np.ndarray, bytes, np.ndarray]:
    """Return means, sign bits and decoded values, by the arithmetic that sign.hpp describes."""
    kind = np.float64 if x.dtype == np.float64 else np.float32
    tiny = kind(2.0**-900 if kind is np.float64 else 2.0**-100)
    means, values = [], []
    with np.errstate(invalid="ignore"):
        for at in range(0, x.size, block):
            part = np.abs(x[at : at + block].astype(kind))
            terms = np.where(part < tiny, kind(0), part * kind(2.0**-17))
            lanes = np.zeros(16, kind)
            for row in range(0, part.size, 16):
                piece = terms[row : row + 16]
                lanes[: piece.size] += piece
            for width in (8, 4, 2, 1):
                lanes[:width] += lanes[width : 2 * width]
            mean = lanes[0] / (kind(part.size) * kind(2.0**-17)) if np.isfinite(lanes[0]) else kind(np.nan)
            means.append(mean)
            values.append(np.where(np.signbit(x[at : at + block]), -mean, mean).astype(kind))
    bits = np.packbits(np.signbit(x), bitorder="little").tobytes()
    return np.array(means, kind), bits, np.concatenate(values)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("block", [8, 24, 128, 1024, 4096, 65536])
def test_message_is_the_models(block, dtype, name):
    rng = np.random.default_rng(block)
    for n in (1, 7, 8, 15, 16, 17, 1001, 4097, 70001):
        x = (rng.standard_normal(n) * np.exp2(rng.uniform(-9, 9, n))).astype(dtype)
        means, bits, values = model(x, block)
        with common.isa(name):
            msg = hc.get_codec("sign", block=block).encode(x)
            out = np.empty(n, means.dtype)
            hc.decode(msg, out=out)
        assert msg[32:].tobytes() == block.to_bytes(4, "little") + bytes(4) + means.tobytes() + bits
        np.testing.assert_array_equal(out, values)


def test_error_on_gaussian_data():
    """One bit keeps 2/pi of a Gaussian's energy: an error of sqrt(1 - 2/pi)."""
    x = common.gaussian(1 << 16)
    error = common.relative_error(x, hc.decode(hc.get_codec("sign").encode(x)))
    assert error == pytest.approx(np.sqrt(1 - 2 / np.pi), abs=0.01)


def test_extreme_magnitudes():
    codec = hc.get_codec("sign:block=65536")
    for value in (np.finfo(np.float32).max, 1.0, 2.0**-100):
        x = np.full(65536, value, np.float32)
        x[1::2] *= -1
        np.testing.assert_allclose(hc.decode(codec.encode(x)), x, rtol=1e-6)
    assert not hc.decode(codec.encode(np.full(100, 1e-38, np.float32))).any()
    x = np.full(1000, np.finfo(np.float64).max)
    np.testing.assert_allclose(hc.decode(codec.encode(x)), x, rtol=1e-12)


def test_only_the_block_of_a_nan_is_lost():
    for bad in (np.nan, np.inf, -np.inf):
        x = common.gaussian(64)
        x[20] = bad
        y = hc.decode(hc.get_codec("sign:block=16").encode(x))
        assert np.isnan(y[16:32]).all()
        assert np.isfinite(np.delete(y, np.s_[16:32])).all()


def test_sizes():
    assert hc.get_codec("sign").bound(0) == 40
    assert hc.get_codec("sign:block=128").bound(129) == 40 + 8 + 17
    assert hc.get_codec("sign:block=128").bound(129, "float64") == 40 + 16 + 17


@pytest.mark.parametrize("block", [0, 12, 65544, True, "8"])
def test_blocks_out_of_range(block):
    with pytest.raises(ValueError, match="block must be a multiple of 8 from 8 to 65536"):
        hc.get_codec("sign", block=block)
