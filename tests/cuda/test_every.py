"""Every codec on a device, briefly: for a memory checker on a GPU, and for both kinds of checks here."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import own_names
from hybridcomp.codecs.device.driver import has_driver
from tests.codecs.common import SPECS
from tests.cuda import common

ON_DEVICE = [spec for spec in SPECS if has_driver(hc.get_codec(spec))]


def test_every_codec_is_here() -> None:
    assert {hc.get_codec(spec).name for spec in SPECS} == set(own_names())
    for name in own_names():
        assert has_driver(hc.get_codec(name)) != type(hc.get_codec(name)).host_only, name
    assert {hc.get_codec(spec).spec for spec in SPECS} - {hc.get_codec(spec).spec for spec in ON_DEVICE} == {
        hc.get_codec(spec).spec for spec in SPECS if "coder=" in spec
    }


def test_coders_without_kernels_say_so() -> None:
    codec = hc.get_codec("bounded:abs=0.1,coder=lz")
    x = np.ones(64, np.float32)
    with pytest.raises(hc.CudaUnavailableError, match="'bounded' has kernels for coder=planes alone"):
        codec.encode(common.to_device(x))
    with pytest.raises(hc.CudaUnavailableError, match="'bounded' has kernels for coder=planes alone"):
        hc.decode(common.to_device(codec.encode(x)))


@pytest.mark.parametrize("spec", ON_DEVICE)
def test_messages_and_values(spec: str) -> None:
    codec = hc.get_codec(spec)
    for dtype, n in (("float32", 3001), ("bfloat16", 515), ("float64", 1)):
        x = common.values("sparse" if codec.name == "sketch" else "mixed", n, dtype)
        if codec.name in common.OWN_BYTES:
            common.check_reads(codec, x, dtype)
        else:
            common.check(codec, x, dtype, outputs=False)


@pytest.mark.parametrize("spec", ON_DEVICE)
def test_not_finite_stays_so(spec: str) -> None:
    codec = hc.get_codec(spec)
    x = np.random.default_rng(1).standard_normal(600).astype(np.float32)
    x[100], x[400] = np.nan, -np.inf
    y = common.to_host(hc.decode(codec.encode(common.to_device(x))))
    if codec.name != "randomblock":  # randomblock sends only a part of its array
        assert not np.isfinite(y[100])
        assert not np.isfinite(y[400])
