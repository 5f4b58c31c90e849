"""``topk``, ``threshold`` and ``sidco`` on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import hybridcomp as hc
from hybridcomp.codecs.device import sparse
from tests.codecs.common import FLOATS
from tests.cuda import common

Array = npt.NDArray[Any]
SPECS = [
    "topk:ratio=0.01",
    "topk:ratio=0.3",
    "topk:ratio=1.0",
    "threshold:abs=0.7",
    "threshold:rel=2.0",
    "sidco:ratio=0.02",
    "sidco:ratio=0.4,stages=3",
    "sidco:ratio=0.05,stages=2,fit=pareto",
    "sidco:ratio=1.0",
]
OTHER_VALUES = [
    "topk:ratio=0.3,values=bf16",
    "topk:ratio=0.05,values=(int8:block=64)",
    "threshold:rel=2.0,values=int4",
    "threshold:abs=0.7,values=fp16",
    "sidco:ratio=0.1,values=bounded",
]
TILE, BLOCK = 1024, 65536


def sample_places(n: int, groups: int) -> Array:
    """Return the elements of n that a sample has (``group_start`` of :file:`hybridcomp/sparse.hpp`)."""
    slot = n // groups
    places = []
    for group in range(groups):
        h = (group * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        h ^= h >> 16
        places.append(slot * group + ((h * (slot // 32)) >> 32) * 32)
    return (np.array(places)[:, None] + np.arange(32)).reshape(-1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in (0, 1, 7, 9, TILE - 1, TILE, TILE + 1, 4097):
        common.check(codec, common.values("gaussian", n, dtype), dtype, outputs=n == 9)
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 700, dtype), dtype, outputs=False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", OTHER_VALUES)
def test_values_by_another_codec(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in (0, 1, 9, 1500):
        common.check(codec, common.values("gaussian", n, dtype), dtype)


@pytest.mark.parametrize("spec", [*SPECS, *OTHER_VALUES])
def test_unaligned_and_hostile(spec: str) -> None:
    codec = hc.get_codec(spec)
    common.check_unaligned(codec, 1333)
    common.check_hostile(codec, common.values("gaussian", 333, "float32"), "float32", flips=60)


@pytest.mark.parametrize("spec", SPECS)
def test_edges_of_index_blocks(spec: str) -> None:
    codec = hc.get_codec(spec)
    for n in (BLOCK - 1, BLOCK, 2 * BLOCK + 5):
        common.check(codec, common.values("mixed", n, "float32"), "float32", outputs=False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.01", "topk:ratio=0.2", "sidco:ratio=0.02", "threshold:abs=2.0"]
)
def test_equal_magnitudes(spec: str, dtype: str) -> None:
    """Among elements equal to the least that is sent, those of lower indices are sent, and no more."""
    codec = hc.get_codec(spec)
    x = np.random.default_rng(1).standard_normal(BLOCK + 3000)
    for data in (np.rint(x), np.full(x.size, -2.5), np.zeros(x.size)):
        common.check(codec, _as(data, dtype), dtype, outputs=False)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_sample_that_misleads(dtype: str) -> None:
    n = BLOCK + 4000
    codec = hc.get_codec("topk:ratio=0.01")
    places = sample_places(n, sparse._guess(n, codec.k(n))[0])
    x = np.random.default_rng(2).standard_normal(n) * 0.1
    few = x.copy()
    few[places[:300]] += 5  # the sample's limit is too high: fewer than k elements reach it
    common.check(codec, _as(few, dtype), dtype, outputs=False)
    many = np.full(n, 3.0) + x  # the limit is too low: elements outside the sample are larger
    many[places] = x[places]
    common.check(codec, _as(many, dtype), dtype, outputs=False)
    together = x.copy()  # a tile has more than there is room for
    together[5000:5500] *= 100
    common.check(codec, _as(together, dtype), dtype, outputs=False)
    common.check(hc.get_codec("threshold:abs=1.0"), _as(together, dtype), dtype, outputs=False)
    common.check(hc.get_codec("sidco:ratio=0.01"), _as(together, dtype), dtype, outputs=False)


def test_a_fit_that_finds_too_few() -> None:
    """If the fit finds too few, the largest of the whole tensor are sent, but no zeros."""
    n, codec = 50_000, hc.get_codec("sidco:ratio=0.01")
    places = sample_places(n, sparse._sample_groups(n, 500, 0))
    x = np.random.default_rng(4).standard_normal(n) * 0.1
    for rest in (x, np.where(x > 0.27, x, 0)):
        data = rest.copy()
        data[places[:300]] += 5
        for dtype in ("float32", "float64", "float16"):
            common.check(codec, _as(data, dtype), dtype, outputs=False)


@pytest.mark.parametrize(
    "spec",
    [
        "sidco:ratio=0.001",
        "sidco:ratio=0.01,stages=2",
        "sidco:ratio=0.2,stages=8",
        "sidco:ratio=0.01,fit=pareto",
        "sidco:ratio=0.01,stages=3,fit=pareto",
    ],
)
def test_fits_of_many_shapes(spec: str) -> None:
    """Stages that go too far, corrections by counting, limits given up."""
    codec = hc.get_codec(spec)
    rng = np.random.default_rng(3)
    n = 40_000
    shapes = {
        "heavy": rng.standard_cauchy(n),
        "two": np.where(rng.random(n) < 0.003, 100.0, 1.0),
        "steps": np.floor(rng.exponential(3, n)),
        "mostly zero": np.where(rng.random(n) < 0.01, rng.standard_normal(n), 0),
        "growing": np.linspace(0, 1, n) ** 9,
        "not finite": np.where(rng.random(n) < 0.002, np.inf, rng.standard_normal(n)),
        "too many not finite": np.where(rng.random(n) < 0.5, np.nan, 1.0),
    }
    for name, data in shapes.items():
        for dtype in ("float32", "float64", "float16") if name == "heavy" else ("float32",):
            common.check(codec, _as(data, dtype), dtype, outputs=False)


def test_section_of_another_tensor() -> None:
    """Counts and indices that do not fit: the CPU's verdict, and nothing written outside."""
    codec = hc.get_codec("topk:ratio=0.05")
    x = common.values("gaussian", 3000, "float32")
    want = np.array(codec.encode(x))
    for at, value in ((32, 149), (40, 303), (48, 151), (52, 0xFFFFFFFF), (52 + 298, 0xFFFF)):
        bad = want.copy()
        bad[at : at + 4] = np.frombuffer(np.uint32(value).tobytes(), np.uint8)
        forged = common.common.reseal(bad)
        out = common.to_device(np.zeros(x.size, np.float32))
        with pytest.raises(hc.WireError):
            hc.decode(forged, out=np.zeros(x.size, np.float32))
        with pytest.raises(hc.WireError):
            hc.decode(common.to_device(forged), out=out)


def _as(data: Array, dtype: str) -> Array:
    """Return doubles as the storage of a dtype."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return data.astype(dtype)
    return (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
