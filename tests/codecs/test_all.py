"""The suite of hybridcomp.testing over every codec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hybridcomp as hc
from hybridcomp.codecs import own_names
from hybridcomp.testing import CHECKS
from tests.codecs import common
from tests.codecs.common import SPECS, torch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def test_suite_covers_every_codec():
    assert {hc.get_codec(s).name for s in SPECS} == set(own_names())


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("spec", SPECS)
def test_checks(spec, check):
    CHECKS[check](hc.get_codec(spec))


@pytest.mark.parametrize(
    "spec",
    [
        "int8",
        "int4:block=24",
        "topk:ratio=0.3,values=bf16",
        "powersgd",
        "lossless",
        "mpc",
        "exponent",
        "bounded:abs=0.1,coder=lz,vector=7",
        "bounded:abs=0.1,coder=huffman",
        "lattice",
        "sketch",
        "randomblock",
    ],
)
def test_hostile_bytes_of_large_messages(spec):
    common.check_hostile(hc.get_codec(spec), common.gaussian(70000))


@settings(deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(SPECS),
    x=hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=20),
        elements=st.floats(-100, 100, width=16),
    ),
)
def test_any_shape(spec, x):
    codec = hc.get_codec(spec)
    y = common.check_round_trip(codec, x)
    assert np.isfinite(y).all()


def test_flush_to_zero_does_not_change_messages():
    """torch.set_flush_denormal sets the processor's modes for this thread; the kernels must not notice."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal(4096) * np.exp2(rng.integers(-149, 120, 4096))).astype(np.float32)
    halves = rng.integers(0, 0x7C00, 4096, np.uint16).view(np.float16)
    # PowerSGD's sums of products are not protected: they are float32 arithmetic on the data itself.
    specs = [spec for spec in SPECS if not spec.startswith("powersgd")]
    specs += ["bounded:rel=1e-30", "bounded:abs=1e-3", "bounded:abs=1e-37", "bounded:abs=1e-42"]
    specs += [f"lattice:bits={b}:rounding={r}" for b in (8, 16, 32) for r in ("nearest", "stochastic")]
    assert np.any((x != 0) & (np.abs(x) < np.finfo(np.float32).tiny))

    def everything() -> list[bytes]:
        found = []
        for name in common.isas():
            with common.isa(name):
                for spec in specs:
                    for data in (x, halves):
                        msg = hc.get_codec(spec).encode(data)
                        found += [msg.tobytes(), hc.decode(msg).tobytes()]
        return found

    plain = everything()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        assert np.float32(1e-30) * np.float32(1e-10) == 0
        flushed = everything()
    finally:
        torch.set_flush_denormal(False)
    assert plain == flushed
