"""Every codec on a device, briefly: what runs under a memory checker on a GPU, and with both kinds of checks here."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import names
from tests.codecs.common import SPECS
from tests.cuda import common


def test_every_codec_is_here() -> None:
    assert {hc.get_codec(spec).name for spec in SPECS} == set(names())


@pytest.mark.parametrize("spec", SPECS)
def test_messages_and_values(spec: str) -> None:
    codec = hc.get_codec(spec)
    for dtype, n in (("float32", 3001), ("bfloat16", 515), ("float64", 1)):
        x = common.values("sparse" if codec.name == "sketch" else "mixed", n, dtype)
        if codec.name in common.OWN_BYTES:
            common.check_reads(codec, x, dtype)
        else:
            common.check(codec, x, dtype, outputs=False)


@pytest.mark.parametrize("spec", SPECS)
def test_not_finite_stays_so(spec: str) -> None:
    codec = hc.get_codec(spec)
    x = np.random.default_rng(1).standard_normal(600).astype(np.float32)
    x[100], x[400] = np.nan, -np.inf
    y = common.to_host(hc.decode(codec.encode(common.to_device(x))))
    if codec.name != "randomblock":  # which sends a part of its array
        assert not np.isfinite(y[100])
        assert not np.isfinite(y[400])
