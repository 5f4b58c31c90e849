"""What the sparse codecs share: the codecs of their values, steps, and messages that lie about them."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import names
from hybridcomp.codecs.registry import classes
from tests.codecs import common

SPARSE = ["topk:ratio=0.2", "threshold:abs=1.3", "sidco:ratio=0.2"]
CARRIERS = sorted(cls.name for cls in classes() if cls.carries_values)


def test_who_carries_values():
    assert {"none", "fp16", "bf16", "int8", "int4"} <= set(CARRIERS)
    assert not {"topk", "threshold", "sidco", "powersgd"} & set(CARRIERS)


@pytest.mark.parametrize("values", CARRIERS)
@pytest.mark.parametrize("spec", SPARSE)
def test_values_go_through_any_of_them(spec, values):
    plain, codec = hc.get_codec(spec), hc.get_codec(spec, values=values)
    inner = hc.get_codec(values)
    for dtype in ("float32", "float64", "float16"):
        for n in (0, 1, 1000, 70000):
            x = common.gaussian(n, dtype, seed=n)
            chosen = np.flatnonzero(hc.decode(plain.encode(x)))
            expected = np.zeros_like(x)
            expected[chosen] = hc.decode(inner.encode(x[chosen]))
            msg = codec.encode(x)
            assert msg.size <= codec.bound(n, dtype)
            np.testing.assert_array_equal(hc.decode(msg), expected)


@pytest.mark.parametrize("values", sorted(set(names()) - set(CARRIERS)))
@pytest.mark.parametrize("spec", SPARSE)
def test_values_that_cannot_nest(spec, values):
    with pytest.raises(ValueError, match=f"values must be one of .*bf16.*, not '{values}'"):
        hc.get_codec(spec, values=values)


@pytest.mark.parametrize("spec", SPARSE)
def test_steps_reach_the_values(spec):
    codec = hc.get_codec(spec)
    assert codec.at_step(3) is codec
    random = hc.get_codec(spec, values="int8:rounding=stochastic")
    later = random.at_step(3)
    assert later.values == random.values.at_step(3) != random.values
    assert type(later) is type(random)
    assert {**later.params, "values": ""} == {**random.params, "values": ""}


def forge(msg: np.ndarray, k: int, index_bytes: int) -> np.ndarray:
    bad = msg.copy()
    bad[32:48] = np.array([k, index_bytes], np.uint64).view(np.uint8)
    return common.reseal(bad)


@pytest.mark.parametrize("spec", SPARSE)
def test_forged_counts(spec):
    x = common.gaussian(1000)
    msg = np.array(hc.get_codec(spec).encode(x))
    k, index_bytes = (int(v) for v in msg[32:48].view(np.uint64))
    for bad_k in (0, k - 1, k + 1, 1001, 2**32, 2**63, 2**64 - 1):
        with pytest.raises(hc.WireError, match="malformed"):
            hc.decode(forge(msg, bad_k, index_bytes))
    for bad_bytes in (0, 3, 4, index_bytes - 1, index_bytes + 1, msg.size - 48, 2**63, 2**64 - 1):
        with pytest.raises(hc.WireError):
            hc.decode(forge(msg, k, bad_bytes))


def test_more_values_than_the_indices_can_hold():
    """The values' message might say a lot in a few bytes; no memory is allocated on its word alone."""
    x = common.gaussian(1 << 20)
    msg = np.array(hc.get_codec("topk:ratio=0.0001").encode(x))
    index_bytes = int(msg[40:48].view(np.uint64)[0])
    with pytest.raises(hc.WireError, match=f"1000000 of 1048576 elements in {index_bytes} bytes of indices"):
        hc.decode(forge(msg, 1000000, index_bytes))


@pytest.mark.parametrize("spec", SPARSE)
def test_a_message_of_another_kind_inside(spec):
    x = common.gaussian(100)
    msg = np.array(hc.get_codec(spec).encode(x))
    k, index_bytes = (int(v) for v in msg[32:48].view(np.uint64))
    head = msg[: 48 + index_bytes]
    for inner in ("topk:ratio=1.0", "threshold:abs=1e-9", "sidco:ratio=1.0", "powersgd"):
        bad = np.concatenate([head, hc.get_codec(inner).encode(common.gaussian(k))])
        bad[16:24] = np.frombuffer((bad.size - 32).to_bytes(8, "little"), np.uint8)
        with pytest.raises(hc.WireError, match=f"values by codec '{inner.split(':')[0]}'"):
            hc.decode(common.reseal(bad))
    for wrong in (common.gaussian(k + 1), common.gaussian(k, "float64")):
        bad = np.concatenate([head, hc.get_codec("none").encode(wrong)])
        bad[16:24] = np.frombuffer((bad.size - 32).to_bytes(8, "little"), np.uint8)
        with pytest.raises(hc.WireError, match="values by codec 'none'"):
            hc.decode(common.reseal(bad))
