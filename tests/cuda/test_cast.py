"""``none``, ``fp16`` and ``bf16`` on a device, and the header and CRC of every message."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from tests.codecs.common import FLOATS
from tests.cuda import common


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["none", "fp16", "bf16"])
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in common.SIZES:
        common.check(codec, common.values("gaussian", n, dtype), dtype)
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 500, dtype), dtype)


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16"])
def test_unaligned_and_hostile(spec: str) -> None:
    codec = hc.get_codec(spec)
    common.check_unaligned(codec, 333)
    common.check_hostile(codec, common.values("gaussian", 77, "float32"), "float32")


@pytest.mark.parametrize("n", [0, 1, 100, 4064, 4096, 4097, 40_000, 140_001])
def test_crc_of_any_length(n: int) -> None:
    data = np.random.default_rng(n).integers(0, 256, n, np.uint8)
    common.assert_same(
        common.to_host(hc.get_codec("none").encode(common.to_device(data))),
        hc.get_codec("none").encode(data),
        "crc",
    )
