"""``mpc`` on a device: the CPU's bytes, for every dtype that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType, as_dtype
from tests.codecs.common import FLOATS, reseal
from tests.cuda import common

SPECS = ["mpc", "mpc:lag=1", "mpc:lag=2", "mpc:lag=31", "mpc:lag=32"]
# Edges of tiles, of chunks, of a warp's and a thread block's chunks, and remainders.
SIZES = [0, 1, 2, 3, 31, 33, 64, 65, 1000, 1023, 1024, 1025, 2049, 4097, 5000]
OTHERS = [d.label for d in DType if not d.is_float]


def smooth(n: int, dtype: str) -> Any:
    """Return data that MPC shrinks, with a part that it does not."""
    rng = np.random.default_rng(n)
    walk = np.cumsum(rng.integers(-3, 4, n))
    kind = as_dtype(dtype)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.component_bytes]
    words = np.repeat(walk, kind.itemsize // kind.component_bytes).astype(np.int64).astype(bits)
    half = words.size // 2
    noisy = slice(half, half + min(1500, words.size // 4))
    words[noisy] = rng.integers(0, np.iinfo(bits).max, words[noisy].size, bits, endpoint=True)
    if kind is DType.BOOL:
        words &= 1
    return words.view(kind.storage)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in SIZES if spec in SPECS[:2] else [1000, 2049]:
        common.check(codec, smooth(n, dtype), dtype, outputs=n in (3, 1025))


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_kinds_of_values(dtype: str) -> None:
    for kind in common.VALUES:
        common.check(hc.get_codec("mpc"), common.values(kind, 1500, dtype), dtype, outputs=False)


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_types(dtype: str) -> None:
    codec = hc.get_codec("mpc")
    for n in (0, 1, 2, 3, 5, 1023, 4 * 1024 + 3, 5001):
        data = smooth(n, dtype)
        want = codec.encode(data)
        common.assert_same(common.to_host(codec.encode(common.to_device(data))), want, f"{n} {dtype}")
        out = common.to_device(np.zeros(n, data.dtype))
        hc.decode(common.to_device(want), out=out)
        assert common.to_host(out).tobytes() == data.tobytes()
        if data.itemsize == 1:  # words of four bytes at any address
            for offset in (1, 3):
                got = common.to_host(codec.encode(common.to_device(data, offset=offset)))
                common.assert_same(got, want, f"{n} {dtype} at {offset}")
                out = common.to_device(np.zeros(n, data.dtype), offset=offset)
                hc.decode(common.to_device(want), out=out)
                assert common.to_host(out).tobytes() == data.tobytes()


def test_many_chunks() -> None:
    # There are more sizes than are summed as a group, and numbers of chunks that make odd addresses.
    for n in (129 * 1024 + 5, 300 * 1024):
        common.check(hc.get_codec("mpc"), smooth(n, "float16"), "float16", outputs=False)


def test_unaligned_and_hostile() -> None:
    codec = hc.get_codec("mpc")
    common.check_unaligned(codec, 1333)
    for n in (77, 2300):
        common.check_hostile(codec, smooth(n, "float32"), "float32", flips=60)


def test_sizes_that_do_not_fit() -> None:
    """Chunks' sizes that are wrong in turn: too long, too short, not their bitmaps'; a count with too few bytes."""
    data = smooth(4000, "float32")
    msg = hc.get_codec("mpc").encode(data)
    sizes = slice(40, 40 + 2 * 4)
    for change in ([+4, -4, 0, 0], [4, 0, 0, 0], [-60000, 0, 0, 0], [0, 0, 0, 30000], [1, -1, 0, 0]):
        bad = msg.copy()
        bad[sizes] = (bad[sizes].view("<u2") + np.array(change)).astype("<u2").view(np.uint8)
        for target in (None, common.to_device(np.zeros(4000, np.float32))):
            with pytest.raises(hc.WireError):
                hc.decode(common.to_device(reseal(bad)), out=target)
    for count in (4001 + 1024, 2**40):
        bad = msg.copy()
        bad[8:16] = np.frombuffer(count.to_bytes(8, "little"), np.uint8)
        with pytest.raises(hc.WireError):
            hc.decode(common.to_device(reseal(bad)))
