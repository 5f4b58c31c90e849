"""Properties of all linear codecs: rounds, and the same bits on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import flatten
from hybridcomp.codecs import LinearCodec, own_names
from hybridcomp.codecs.linear.base import UFUNCS, Reduced, Round, reduce_all
from tests.codecs import common

SPECS = [
    "powersgd",
    "randomblock:ratio=0.1",
    "lattice",
    "lattice:bits=16:rounding=stochastic",
    "sketch",
    "sketch:form=packed",
    "sketch:index=bloom",
]


def test_every_linear_codec_is_here():
    linear = {name for name in own_names() if hc.get_codec(name).linear}
    assert linear == {hc.get_codec(spec).name for spec in SPECS}
    assert all(isinstance(hc.get_codec(name), LinearCodec) for name in linear)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 9), (40, 50), (0, 5)])
def test_all_ranks_get_the_same_bits(spec, dtype, shape):
    parts = [common.gaussian(int(np.prod(shape)), dtype, seed=r).reshape(shape) for r in range(3)]
    before = [p.tobytes() for p in parts]
    results = reduce_all(spec, parts, step=4)
    assert len({r.total.tobytes() for r in results}) == 1
    for result in results:
        assert result.total.shape == result.own.shape == (int(np.prod(shape)),)
        assert result.total.dtype == result.own.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert [p.tobytes() for p in parts] == before, "the data changed"


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_are_plain_arrays_and_as_many_as_told(spec):
    codec = hc.get_codec(spec)
    x = common.gaussian(600).reshape(20, 30)
    steps = codec.reduction(flatten(x), ranks=1, own=False)
    results = []

    def run():
        results.append((yield from steps))

    count = 0
    for following in run():
        assert isinstance(following, Round)
        for one in following.together:
            count += 1
            assert one.op in UFUNCS
            assert one.array.flags.c_contiguous
            assert one.array.flags.aligned
            assert one.array.dtype.kind in ("fi" if one.op == "sum" else "u")
    (result,) = results
    assert isinstance(result, Reduced)
    assert result.own is None
    assert count == codec.sums


@pytest.mark.parametrize("spec", SPECS)
def test_unaligned_data(spec):
    x = common.gaussian(600).reshape(20, 30)
    raw = np.empty(x.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(x.shape)
    unaligned[...] = x
    a, b = reduce_all(spec, [x])[0], reduce_all(spec, [unaligned])[0]
    assert a.total.tobytes() == b.total.tobytes()


def test_powersgd_sums_what_it_can_and_keeps_q():
    rng = np.random.default_rng(2)
    base = rng.standard_normal((60, 3)) @ rng.standard_normal((3, 80))
    parts = [(base * r).astype(np.float32) for r in (1, 2, 3)]
    warm = [{}, {}, {}]
    results = reduce_all("powersgd:rank=4", parts, warm=warm, name="w")
    assert common.relative_error(base * 6, results[0].total) < 1e-5
    assert common.relative_error(base * 2, results[0].own) < 1e-5  # the mean
    assert warm[0]["w"].shape == (80, 4)
    assert warm[0]["w"].tobytes() == warm[2]["w"].tobytes()
    noisy = [(p + rng.standard_normal(p.shape)).astype(np.float32) for p in parts]
    want = sum(p.astype(np.float64) for p in noisy) / 3
    cold = reduce_all("powersgd:rank=3", noisy, mean=True)[0].total
    for _ in range(5):
        again = reduce_all("powersgd:rank=3", noisy, mean=True, warm=warm, name="v")[0].total
    assert common.relative_error(want, again) < common.relative_error(want, cold)
    spoilt = [np.full((60, 80), np.inf, np.float32)] * 3
    kept = warm[0]["v"].copy()
    with np.errstate(invalid="ignore"):
        assert np.isnan(reduce_all("powersgd:rank=3", spoilt, warm=warm, name="v")[0].total).all()
    np.testing.assert_array_equal(warm[0]["v"], kept)


def test_ranks_that_differ_are_found():
    with pytest.raises(ValueError, match="ranks differ in their rounds"):
        reduce_all("lattice", [np.ones(3, np.float32), np.ones(4, np.float32)])
