"""``int8``, ``int4`` and ``int2`` on a device."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from tests.codecs.common import FLOATS
from tests.cuda import common

BITS = [8, 4, 2]
# Blocks that have kernels of their own: powers of two, any others, long ones, transformed ones.
PLAIN = ["block=128", "block=32", "block=512", "block=1024", "block=24", "block=8", "block=65536"]
FORMS = [
    "rounding=stochastic,seed=5",
    "block=64,symmetric=false",
    "block=4096,symmetric=false,rounding=stochastic",
    "block=24,symmetric=false,rounding=stochastic,seed=6",
    "block=8,hadamard=true,symmetric=false,rounding=stochastic",
    "block=32,hadamard=true",
    "block=256,hadamard=true,rounding=stochastic,seed=9",
    "block=2048,hadamard=true",
]


@pytest.mark.parametrize("form", [*PLAIN, *FORMS])
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_the_cpus(bits: int, form: str) -> None:
    codec = hc.get_codec(f"int{bits}:{form}")
    for dtype in FLOATS:
        for n in common.SIZES if dtype == "float32" else (0, 9, 129, 4097):
            x = common.values("gaussian", n, dtype, n)
            common.check(codec, x, dtype, outputs=n in (0, 9, 129, 4097))
    for dtype in ("float32", "float64"):
        for kind in common.VALUES:
            common.check(codec, common.values(kind, 1500, dtype), dtype, outputs=False)


@pytest.mark.parametrize(
    "form", ["block=128", "block=1024", "block=40,symmetric=false", "block=64,hadamard=true"]
)
@pytest.mark.parametrize("bits", BITS)
def test_unaligned_and_hostile(bits: int, form: str) -> None:
    codec = hc.get_codec(f"int{bits}:{form}")
    common.check_unaligned(codec, 1333)
    common.check_hostile(codec, common.values("gaussian", 333, "float32"), "float32", flips=40)


@pytest.mark.parametrize("bits", BITS)
def test_values_between_integers_round_as_the_cpus(bits: int) -> None:
    codec = hc.get_codec(f"int{bits}")
    x = common.values("gaussian", 1280, "float32").reshape(10, 128)
    x[:, 0] = 2 ** (bits - 1) - 1  # a scale of one, and ties
    x[:, 1:] = np.round(np.clip(x[:, 1:], -1, 1) * 2) / 2
    common.check(codec, x.reshape(-1), "float32", outputs=False)
