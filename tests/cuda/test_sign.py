"""``sign`` on a device."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.device import Queue
from tests.codecs.common import FLOATS
from tests.cuda import common

# Blocks: the default; no multiple of the sixteen sums; the least; half a step; groups of 512 and something; the most.
SPECS = ["sign", "sign:block=24", "sign:block=8", "sign:block=136", "sign:block=680", "sign:block=65536"]
# Edges of a block, of a warp's two blocks, of a group of 512 and of a decoder's chunk of 1024.
SIZES = [511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 3100]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in sorted({*common.SIZES, *SIZES}):
        common.check(codec, common.values("mixed", n, dtype, seed=n), dtype, outputs=n in (129, 4097))
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 1100, dtype), dtype, outputs=kind == "not finite")


@pytest.mark.parametrize("dtype", FLOATS)
def test_largest_and_smallest(dtype: str) -> None:
    """No sum of the largest numbers overflows; what counts as zero does so on both."""
    codec = hc.get_codec("sign:block=1024")
    largest = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F, "float16": 0x7BFF, "float64": 0x7FEFFFFFFFFFFFFF}[
        dtype
    ]
    smallest = {"float32": 0x0D800000, "bfloat16": 0x0D80, "float16": 1, "float64": 0x07B0000000000000}[dtype]
    storage = common.values("zeros", 2048, dtype)
    words = storage.view(f"u{storage.itemsize}")
    words[:1024] = largest
    words[1024::3] = smallest
    words[1025::3] = smallest - 1
    words[::5] |= words.dtype.type(1) << words.dtype.type(8 * storage.itemsize - 1)
    common.check(codec, storage, dtype)


@pytest.mark.parametrize("spec", ["sign", "sign:block=24", "sign:block=2056"])
def test_any_grid_writes_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block strides over all of the array."""
    monkeypatch.setattr(Queue, "blocks", lambda self, items, per_block, waves=8: min(1, items))
    x = common.values("mixed", 20_100, "float32")
    common.check(hc.get_codec(spec), x, "float32", outputs=False)


@pytest.mark.parametrize("spec", ["sign", "sign:block=24"])
def test_unaligned_and_hostile(spec: str) -> None:
    codec = hc.get_codec(spec)
    common.check_unaligned(codec, 3333)
    common.check_hostile(codec, common.values("gaussian", 77, "float32"), "float32")


def test_signs_of_what_is_no_number() -> None:
    """Zeros and NaN have signs, and they are sent."""
    x = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf] * 200, np.float32)
    common.check(hc.get_codec("sign:block=64"), x, "float32")
