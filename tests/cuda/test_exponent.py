"""``exponent`` on a device: the CPU's bytes, of every form, and its verdicts on hostile ones."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType, as_dtype
from tests.codecs.common import FLOATS, reseal
from tests.codecs.test_exponent import sets
from tests.cuda import common

# Edges of blocks and of thread blocks, and remainders.
SIZES = [0, 1, 31, 33, 255, 256, 257, 1023, 1024, 1025, 2049]
OTHERS = [d.label for d in DType if not d.is_float]


@pytest.mark.parametrize("dtype", FLOATS)
def test_bytes_are_the_cpus(dtype: str) -> None:
    for n in SIZES:
        data = common.values("gaussian", n, dtype)
        common.check(hc.get_codec("exponent"), data, dtype, outputs=n in (33, 1025))


@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_of_every_form(dtype: str) -> None:
    for n, names in ((1500, None), (20_000, ["more and more escapes", "with zeros, too", "wider"])):
        for name, data in sets(as_dtype(dtype), n).items():
            if names is None or name in names:
                common.check(hc.get_codec("exponent"), data, dtype, outputs=False)


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_types(dtype: str) -> None:
    codec = hc.get_codec("exponent")
    for n in (0, 1, 1023):
        data = np.arange(n).astype(as_dtype(dtype).storage)
        want = codec.encode(data)
        common.assert_same(common.to_host(codec.encode(common.to_device(data))), want, f"{n} {dtype}")
        out = common.to_device(np.zeros(n, data.dtype))
        hc.decode(common.to_device(want), out=out)
        assert common.to_host(out).tobytes() == data.tobytes()


def test_unaligned_and_hostile() -> None:
    codec = hc.get_codec("exponent")
    common.check_unaligned(codec, 1333)
    for n in (77, 1100):
        common.check_hostile(codec, common.values("gaussian", n, "float32"), "float32", flips=60)


def test_codes_that_do_not_fit() -> None:
    """Lengths that do not add up, codes that there are not, other numbers of escapes; too high a count."""
    data = common.values("gaussian", 3000, "float32")
    msg = hc.get_codec("exponent").encode(data)
    codes = msg[32:44].copy()
    unequal = next(i for i in range(1, 11) if codes[i] != codes[0])
    swapped = codes.copy()
    swapped[[0, unequal]] = codes[[unequal, 0]]
    wrong = [swapped]
    for at, value in ((0, codes[0] ^ 1), (0, 254), (0, 255), (3, 128), (11, 3), (11, 254)):
        wrong.append(codes.copy())
        wrong[-1][at] = value
    for change in wrong:
        bad = msg.copy()
        bad[32:44] = change
        for target in (None, common.to_device(np.zeros(3000, np.float32))):
            with pytest.raises(hc.WireError):
                hc.decode(common.to_device(reseal(bad)), out=target)
    for count in (3001 + 256, 2**40):
        bad = msg.copy()
        bad[8:16] = np.frombuffer(count.to_bytes(8, "little"), np.uint8)
        with pytest.raises(hc.WireError):
            hc.decode(common.to_device(reseal(bad)))
