"""sketch: messages to the bit, sketches against a model, peeling, and sums."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import flatten
from hybridcomp.codecs.linear import sketch_plan
from hybridcomp.codecs.linear import sketch_sums as sketch
from hybridcomp.codecs.linear.base import reduce_all
from hybridcomp.codecs.linear.bloom import PART
from hybridcomp.codecs.linear.sketch_plan import Table
from tests.codecs import common
from tests.codecs.feedback.models import uniform_bits


def sparse(n: int, density: float, dtype: str = "float32", seed: int = 0, whole: bool = False):
    """Return mostly zeros; with ``whole`` the others are small integers, whose sums are exact in any order."""
    rng = np.random.default_rng([seed, n])
    values = rng.integers(1, 100, n) if whole else rng.standard_normal(n)
    return np.where(rng.random(n) < density, values, 0).astype(dtype)


def bitmap(x: np.ndarray) -> np.ndarray:
    """Return the words of a bitmap of non-zeros."""
    raw = np.packbits(x != 0, bitorder="little")
    return np.pad(raw, (0, -raw.size % 8)).view(np.uint64)


def places(table: Table, block: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return row and sign of each hash of blocks."""
    found = []
    for h in range(3):
        bits = uniform_bits(table.seed, block, h).astype(np.uint64)
        rows = (bits * np.uint64(table.third)) >> np.uint64(32)
        found.append((h * table.third + rows.astype(np.int64), np.where(bits & np.uint64(1), -1, 1)))
    return found


def model_fold(x: np.ndarray, table: Table) -> np.ndarray:
    """Return the counters after each element was added to its three, in order."""
    sums = np.zeros(table.counters, x.dtype)
    at = np.flatnonzero(x)
    for row, sign in places(table, at // table.lanes):
        np.add.at(sums, row * table.lanes + at % table.lanes, (sign * x[at]).astype(x.dtype))
    return sums


# -- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", common.FLOATS)
@pytest.mark.parametrize("density", [0, 0.01, 0.5, 0.95, 1])
def test_messages_are_exact_to_the_bit(dtype, density):
    """Any bits: denormals, NaN payloads, infinities, -0."""
    rng = np.random.default_rng(3)
    kind = hc.arrays.as_dtype(dtype)
    for n in (1, 63, 64, 65, 5000):
        raw = np.frombuffer(rng.bytes(n * kind.itemsize), f"u{kind.itemsize}").copy()
        raw[rng.random(n) >= density] = 0
        raw[: n // 20] = 1 << (8 * kind.itemsize - 1)  # -0
        out = np.empty(32 + 16 + n * kind.itemsize, np.uint8)
        data = raw.view(kind.storage)
        codec = hc.get_codec("sketch")
        size = codec.encode_flat(hc.arrays.Flat(data, kind, data.shape, True, False), out)
        back = np.empty(n, kind.storage)
        msg, header = hc.wire.open_message(out[:size])
        codec.decode_flat(msg, header, back, kind)
        assert back.tobytes() == raw.tobytes()
        packed = 32 + 16 + 8 * -(-n // 64) + np.count_nonzero(raw) * kind.itemsize
        assert size == min(packed, out.size)


def test_isas_agree_on_sparse_data():
    for dtype in common.FLOATS:
        for n in (1, 129, 4999, 70001):
            x = common.gaussian(n, dtype, seed=n)
            x[np.random.default_rng(n).random(n) < 0.9] = 0
            common.check_isas_agree(hc.get_codec("sketch"), x)
            common.check_round_trip(hc.get_codec("sketch"), x)


def test_hostile_sparse_messages():
    for n in (30, 200, 70000):
        common.check_hostile(hc.get_codec("sketch"), sparse(n, 0.05))


def test_forged_fields():
    msg = hc.get_codec("sketch").encode(sparse(100, 0.2))
    k = struct.unpack_from("<Q", msg.tobytes(), 40)[0]
    assert 0 < k < 50
    for at, value in [
        (0, struct.pack("<I", 2)),
        (0, struct.pack("<I", 0)),
        (4, struct.pack("<I", 1)),
        (8, struct.pack("<Q", k + 1)),
        (8, struct.pack("<Q", 2**63)),
        (16, b"\xff"),
        (16 + 15, b"\x80"),
    ]:
        bad = msg.copy()
        bad[32 + at : 32 + at + len(value)] = np.frombuffer(value, np.uint8)
        for call in (hc.decode, lambda m: hc.decode_add(m, np.zeros(100, np.float32))):
            with pytest.raises(hc.WireError, match="malformed sketch payload"):
                call(common.reseal(bad))


# -- sketches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lanes", [1, 4, 64])
def test_the_sketch_is_the_models(dtype, lanes):
    for n in (1, 100, 3001):
        x = sparse(n, 0.1, dtype)
        table = Table(lanes, 37, 2**40 + n)
        counters = np.zeros(table.counters, dtype)
        sketch.fold(bitmap(x), flatten(x), table, counters)
        np.testing.assert_array_equal(counters, model_fold(x, table))
    half = sparse(500, 0.1, "float16")
    counters = np.zeros(table.counters, np.float32)
    sketch.fold(bitmap(half), flatten(half), table, counters)
    np.testing.assert_array_equal(counters, model_fold(half.astype(np.float32), table))


def recovered(load: float, n: int = 40_000, lanes: int = 1) -> float:
    """Return the share of non-zeros, a tenth of all, that peeling a sketch of that load gives back exactly."""
    x = sparse(n, 0.1, whole=True)
    k = np.count_nonzero(x)
    table = Table(lanes, round(k / (3 * load) / lanes), 5)
    counters = np.zeros(table.counters, np.float32)
    sketch.fold(bitmap(x), flatten(x), table, counters)
    out = np.zeros_like(x)
    left = sketch.peel(bitmap(x), table, counters, out)
    exact = np.count_nonzero((out == x) & (x != 0))
    assert exact >= k - left
    return (k - left) / k


def test_peeling_works_below_the_threshold_and_collapses_above():
    """The 3-core of a random hypergraph appears at a load of 0.818."""
    assert recovered(0.6) == 1
    assert recovered(0.78) == 1
    assert recovered(0.9) < 0.5
    assert recovered(1.2) < 0.2


def test_what_is_left_over_gets_the_median_of_its_counters():
    x = sparse(300, 0.5)
    table = Table(2, 7, 1)
    counters = model_fold(x, table)
    signed = []
    at = np.flatnonzero(x)
    for row, sign in places(table, at // 2):
        signed.append(counters[row * 2 + at % 2] * sign)
    out = np.full_like(x, 7)
    assert sketch.peel(bitmap(x), table, counters.copy(), out) == at.size, "nothing is alone here"
    np.testing.assert_array_equal(out[at], np.median(signed, axis=0).astype(np.float32))
    assert (out[x == 0] == 7).all()


def test_kernels_check_their_arguments():
    k = native.kernels()
    x, words = np.zeros(100, np.float32), np.zeros(2, np.uint64)
    past = np.array([0, 2**63], np.uint64)
    for call, what in [
        (lambda: k.sketch_mask(x, 1, words[:1]), "a bit per element"),
        (lambda: k.sketch_count(past, 100), "past the last element"),
        (lambda: k.sketch_gather(words, x, 1, x), "one per bit"),
        (lambda: k.sketch_fold(words, x, 1, 3, 5, 0, x), "power of two"),
        (lambda: k.sketch_fold(words, x, 1, 4, 0, 0, x), "third is out of range"),
        (lambda: k.sketch_fold(words, x, 1, 4, 2**31, 0, x), "third is out of range"),
        (lambda: k.sketch_fold(words, x, 1, 4, 5, 0, x), "one per row and lane"),
        (lambda: k.sketch_peel(past, 4, 1, 0, x[:12], x, 1, False), "past the last element"),
        (lambda: k.sketch_peel(words, 4, 5, 0, x, x, 1, False), "one per row and lane"),
        (lambda: k.sketch_stuck(words, 1000, 4, 5, 0), "a bit per element"),
        (lambda: k.sketch_fullest(words, 100, 0), "power of two"),
        (lambda: k.sketch_scatter(words[:1], x, x, 1, False), "a bit per element"),
    ]:
        with pytest.raises(ValueError, match=what):
            call()


# -- sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sketch", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sums_of_whole_numbers_are_exact(form, dtype, ranks):
    codec = hc.get_codec("sketch", form=form)
    for n in (0, 1, 100, 70_000, PART + 1000):
        parts = [sparse(n, 0.02, dtype, seed=r, whole=True) for r in range(ranks)]
        want = sum(p.astype(np.float64) for p in parts)
        for result, part in zip(reduce_all(codec, parts), parts, strict=True):
            assert result.recovered == 1
            assert result.total.dtype == (np.float64 if dtype == "float64" else np.float32)
            np.testing.assert_array_equal(result.total, want)
            np.testing.assert_array_equal(result.own, part)


def test_sums_are_near_and_means_are_divided():
    parts = [sparse(50_000, 0.02, seed=r) for r in range(3)]
    want = sum(p.astype(np.float64) for p in parts)
    total = reduce_all("sketch", parts)[2].total
    assert common.relative_error(want, total) < 1e-6
    mean = reduce_all("sketch", parts, mean=True)[0].total
    assert common.relative_error(want / 3, mean) < 1e-6
    packed = reduce_all("sketch:form=packed", parts)[0].total
    np.testing.assert_array_equal(packed, parts[0] + parts[1] + parts[2])


def numbers(codec, parts) -> int:
    """Return how many numbers round 2 sums."""
    union = bitmap(np.any([p != 0 for p in parts], axis=0))
    return sum(part.size for part in codec.plan(union, parts[0].size))


def test_the_table_fits_the_union_and_the_part():
    codec = hc.get_codec("sketch")
    n = 2 * PART
    for density in (0.005, 0.02, 0.1):
        parts = [sparse(n, density, seed=r) for r in range(2)]
        union = np.count_nonzero((parts[0] != 0) | (parts[1] != 0))
        assert union / 0.6 <= numbers(codec, parts) < 1.15 * union / 0.6
        assert numbers(hc.get_codec("sketch:form=packed"), parts) == union
    dense = common.gaussian(n)
    assert numbers(codec, [dense]) == n
    np.testing.assert_array_equal(reduce_all(codec, [dense])[0].total, dense)
    mixed = sparse(n, 0.01)
    mixed[:PART] = dense[:PART]
    assert PART < numbers(codec, [mixed]) < 1.03 * PART
    assert numbers(codec, [np.zeros(n, np.float32)]) == 0


def test_columns_and_rows_of_a_matrix():
    """All non-zeros in one lane, or whole blocks of them: still everything is recovered."""
    for kept in (np.s_[:, 3], np.s_[::50, :]):
        x = np.zeros((1000, 64), np.float32)
        x[kept] = 1 + np.arange(x[kept].size).reshape(x[kept].shape) % 50
        for result in reduce_all("sketch", [x, 2 * x]):
            assert result.recovered == 1
            np.testing.assert_array_equal(result.total, 3 * x.reshape(-1))


def test_a_high_load_grows_until_it_can_be_peeled():
    parts = [sparse(60_000, 0.05, whole=True, seed=r) for r in range(2)]
    result = reduce_all("sketch:load=1.0", parts)[0]
    assert result.recovered == 1
    np.testing.assert_array_equal(result.total, parts[0] + parts[1])


def test_the_share_recovered_is_told(monkeypatch):
    monkeypatch.setattr(sketch_plan, "_TRIES", 1)
    parts = [sparse(60_000, 0.05, whole=True, seed=r) for r in range(2)]
    result = reduce_all("sketch:load=1.0", parts)[0]
    assert 0 < result.recovered < 0.6
    wrong = np.count_nonzero(result.total != parts[0] + parts[1])
    union = np.count_nonzero(parts[0] + parts[1])
    assert 0 < wrong <= round((1 - result.recovered) * union)


@pytest.mark.parametrize("form", ["sketch", "packed"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_overflow_is_seen(form, bad):
    for at in (0, 1234, 4999):
        parts = [sparse(5000, 0.02, seed=r) for r in range(3)]
        parts[1][at] = bad
        for result in reduce_all(hc.get_codec("sketch", form=form), parts):
            assert not np.isfinite(result.total[at])


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"load": 0.01}, "load must be a number from 0.05 to 1"),
        ({"load": True}, "load must be"),
        ({"load": np.nan}, "load must be"),
        ({"form": "bloom"}, "form must be one of sketch, packed"),
        ({"lanes": 3}, "lanes must be a power of two"),
        ({"lanes": 8192}, "lanes must be an integer from 1 to 4096"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_parameters(params, what):
    with pytest.raises(ValueError, match=what):
        hc.get_codec("sketch", **params)
