"""Properties that sparse codecs share: the codecs of their values, steps, and messages that lie about them."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import wire
from hybridcomp.codecs import own_names
from hybridcomp.codecs.table import classes
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


@pytest.mark.parametrize("values", sorted(set(own_names()) - set(CARRIERS)))
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


def opened(spec: str, dtype: str, n: int, seed: int) -> tuple[np.ndarray, wire.Header]:
    return wire.open_message(np.array(hc.get_codec(spec).encode(common.gaussian(n, dtype, seed=seed))))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("spec", [*SPARSE, "topk:ratio=0.001", "topk:ratio=0.1,values=int8", "int8"])
def test_a_sum_is_what_adding_one_after_the_other_gives(spec, dtype):
    codec = hc.get_codec(spec)
    wide = np.float64 if dtype == "float64" else np.float32
    for n in (0, 1, 1000, 65_536, 200_003):
        messages = [opened(spec, dtype, n, seed) for seed in range(3)]
        want = np.zeros(n, wide)
        for raw, header in messages:
            codec.decode_add_flat(raw, header, want)
        got = np.full(n + 1, np.nan, wide)
        codec.decode_sum_flat(messages, got[1:])  # at any address
        assert got[1:].tobytes() == want.tobytes()
        codec.decode_sum_flat([], got)
        assert not got.any()


def test_threads_give_the_same_sum():
    messages = [opened("threshold:rel=1.5", "float32", 300_001, seed) for seed in range(3)]
    one, three = np.empty(300_001, np.float32), np.empty(300_001, np.float32)
    hc.codecs.ThresholdCodec.decode_sum_flat(messages, one)
    hc.set_num_threads(3)
    try:
        hc.codecs.ThresholdCodec.decode_sum_flat(messages, three)
    finally:
        hc.set_num_threads(1)
    assert one.tobytes() == three.tobytes()


@pytest.mark.parametrize("spec", SPARSE)
def test_a_damaged_part_of_a_sum(spec):
    n = 1000
    good, header = opened(spec, "float32", n, 0)
    k, index_bytes = (int(v) for v in good[32:48].view(np.uint64))
    out = np.empty(n, np.float32)
    for forged in (forge(good, k + 1, index_bytes), forge(good, k, index_bytes + 1), forge(good, 0, 2**63)):
        for messages in ([(forged, header), (good, header)], [(good, header), (forged, header)]):
            with pytest.raises(hc.WireError):
                hc.get_codec(spec).decode_sum_flat(messages, out)
    late = good.copy()
    late[52:54] = 255  # the first of the indices, or of the bits
    with pytest.raises(hc.WireError):
        hc.get_codec(spec).decode_sum_flat([(good, header), (common.reseal(late), header)], out)
