"""sketch with a Bloom filter as index: the filter against a model, its rate, and sums in one round."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import DType, flatten
from hybridcomp.codecs.linear import bloom
from hybridcomp.codecs.linear.base import Round, reduce_all
from hybridcomp.codecs.linear.bloom import PART, Filter, Run
from hybridcomp.codecs.linear.sketch_plan import runs_of
from tests.codecs import common
from tests.codecs.feedback.models import uniform_bits
from tests.codecs.linear.test_sketch import bitmap, sparse


def run_of(n: int, how: Filter) -> list[Run]:
    """Return one run of parts, as a plan has it."""
    return [Run(slice(0, n), how, slice(0, how.words * -(-n // PART)))]


def model_bits(n: int, how: Filter) -> np.ndarray:
    """Return the bits (n, hashes) of each element's part."""
    at = np.arange(n) % PART
    first, second = (uniform_bits(how.seed, at, h).astype(np.uint64) for h in (3, 4))
    probes = first[:, None] + np.arange(how.hashes, dtype=np.uint64) * (second | np.uint64(1))[:, None]
    return ((probes & np.uint64(2**32 - 1)) * np.uint64(how.bits)) >> np.uint64(32)


def unpacked(words: np.ndarray, n: int) -> np.ndarray:
    """Return a bitmap as bools."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:n].astype(bool)


# -- filters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 63, 64, 65, 5001, PART, PART + 77])
@pytest.mark.parametrize("rate", [0.5, 0.03, 1e-9])
def test_the_filter_is_the_models(n, rate):
    x = sparse(n, 0.02, seed=3)
    x[-1] = 1
    how = Filter.of(np.count_nonzero(x[:PART]), rate, 77)
    runs, bits = run_of(n, how), model_bits(n, how)
    want = np.zeros((-(-n // PART), how.bits), bool)
    for i in np.flatnonzero(x):
        want[i // PART, bits[i].astype(np.int64)] = True
    filters = bloom.insert(runs, bitmap(x))
    np.testing.assert_array_equal(unpacked(filters, want.size), want.reshape(-1))
    held = want[np.arange(n)[:, None] // PART, bits.astype(np.int64)].all(axis=1)
    for isa in common.isas():
        with common.isa(isa):
            words, count = bloom.query(runs, filters, n)
        np.testing.assert_array_equal(unpacked(words, n), held)
        assert words.size == -(-n // 64)
        assert count == np.count_nonzero(held)
        assert not unpacked(words, words.size * 64)[n:].any()
    assert held[x != 0].all(), "an element was missed"


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.3, 0.1, 0.01, 0.001])
def test_the_rate_is_the_parameters(rate):
    """The rate is right within the error of a sample: false positives of 20 filters of 3,000 elements."""
    found = others = 0
    for seed in range(20):
        x = sparse(100_000, 0.03, seed=seed)
        runs = run_of(x.size, Filter.of(np.count_nonzero(x), rate, seed))
        words, _ = bloom.query(runs, bloom.insert(runs, bitmap(x)), x.size)
        held = unpacked(words, x.size)
        found += np.count_nonzero(held & (x == 0))
        others += np.count_nonzero(x == 0)
    assert found / others == pytest.approx(rate, rel=0.05 if rate >= 0.01 else 0.12)


def test_filters_are_as_long_as_theory_says():
    for rate, hashes in ((0.5, 1), (0.25, 2), (0.01, 7), (0.001, 10), (1e-9, 30)):
        how = Filter.of(10_000, rate, 0)
        assert how.hashes == hashes
        ideal = -10_000 * np.log(rate) / np.log(2) ** 2
        assert ideal - 64 <= how.bits <= 1.01 * ideal + 64
    assert Filter.of(0, 0.01, 0).bits == 64


def test_kernels_check_their_arguments():
    k = native.kernels()
    words, out = np.zeros(2, np.uint64), np.zeros(1, np.uint64)
    past = np.array([0, 2**63], np.uint64)
    raw = np.zeros(9, np.uint8)[1:]
    for call, what in [
        (lambda: k.bloom_insert(past, 100, 128, 64, 1, 0, out), "past the last element"),
        (lambda: k.bloom_insert(words, 200, 128, 64, 1, 0, out), "a bit per element"),
        (lambda: k.bloom_insert(words, 100, 100, 64, 1, 0, out), "part must be"),
        (lambda: k.bloom_insert(words, 100, 0, 64, 1, 0, out), "part must be"),
        (lambda: k.bloom_insert(words, 100, 128, 65, 1, 0, out), "bits must be"),
        (lambda: k.bloom_insert(words, 100, 128, 0, 1, 0, out), "bits must be"),
        (lambda: k.bloom_insert(words, 100, 128, 64, 0, 0, out), "hashes is out of range"),
        (lambda: k.bloom_insert(words, 100, 128, 64, 33, 0, out), "hashes is out of range"),
        (lambda: k.bloom_insert(words, 100, 64, 64, 1, 0, out), "bits of all parts"),
        (lambda: k.bloom_insert(words, 100, 128, 64, 1, 0, raw), "aligned"),
        (lambda: k.bloom_query(out, 100, 128, 64, 1, 0, out), "a bit per element"),
        (lambda: k.bloom_query(out, 100, 128, 128, 1, 0, words), "bits of all parts"),
    ]:
        with pytest.raises(ValueError, match=what):
            call()


# -- sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_sums_of_whole_numbers_are_exact(dtype, ranks):
    codec = hc.get_codec("sketch:index=bloom:density=0.04")
    for n in (0, 1, 2, 100, 4097, 70_001, PART - 1, PART + 1000):
        parts = [sparse(n, 0.005, dtype, seed=r, whole=True) for r in range(ranks)]
        want = sum(p.astype(np.float64) for p in parts)
        for result, part in zip(reduce_all(codec, parts), parts, strict=True):
            assert result.recovered == 1
            assert result.total.dtype == (np.float64 if dtype == "float64" else np.float32)
            np.testing.assert_array_equal(result.total, want)
            np.testing.assert_array_equal(result.own, part)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fpr", [0.3, 0.02, 1e-4])
def test_false_positives_are_zeros(dtype, fpr):
    """Elements outside the union are zero though float addition rounds the others, over four orders of magnitude."""
    scales = 10.0 ** np.random.default_rng(1).integers(-2, 3, (4, 200_000))
    parts = [(sparse(200_000, 0.01, dtype, seed=r) * scales[r]).astype(dtype) for r in range(4)]
    want = sum(p.astype(np.float64) for p in parts)
    codec = hc.get_codec("sketch", index="bloom", fpr=fpr, density=0.04)
    results = reduce_all(codec, parts)
    union = np.any([p != 0 for p in parts], axis=0)
    assert len({r.total.tobytes() for r in results}) == 1
    assert results[0].recovered == 1
    assert not results[0].total[~union].any()
    assert common.relative_error(want, results[0].total) < (1e-6 if dtype == "float32" else 1e-15)
    mean = reduce_all(codec, parts, mean=True)[0].total
    assert common.relative_error(want / 4, mean) < (1e-6 if dtype == "float32" else 1e-15)


def rounds_of(codec, x: np.ndarray) -> list[Round]:
    """Return the rounds of a reduction by one rank."""
    return list(codec.reduction(flatten(x), ranks=1))


def test_one_round_whose_sizes_follow_from_the_count():
    codec = hc.get_codec("sketch:index=bloom:density=0.01")
    assert codec.fixed_sums
    assert not hc.get_codec("sketch").fixed_sums
    n = PART + 30_000
    sizes = []
    for x in (np.zeros(n, np.float32), sparse(n, 0.01), common.gaussian(n)):
        (one,) = rounds_of(codec, x)
        index, table = one.together
        assert (index.op, index.array.dtype, table.op, table.array.dtype) == (
            "or",
            np.uint64,
            "sum",
            np.float32,
        )
        sizes.append((index.array.size, table.array.size))
    assert len(set(sizes)) == 1
    members, held = n * 0.01, n * (0.01 + 0.001 * 0.99)
    assert held / 0.6 <= sizes[0][1] < 1.02 * held / 0.6
    ideal = members * np.log(1000) / np.log(2) ** 2 / 64
    assert ideal <= sizes[0][0] < 1.01 * ideal + 2


def test_dense_parts_go_as_they_are():
    codec = hc.get_codec("sketch:index=bloom:density=0.5")
    x = [common.gaussian(1001, seed=r) for r in range(3)]
    (one,) = rounds_of(codec, x[0])
    assert [each.array.size for each in one.together] == [0, 1001]
    result = reduce_all(codec, x)[0]
    np.testing.assert_array_equal(result.total, x[0] + x[1] + x[2])
    assert result.recovered == 1
    # the last part is too short for a table
    codec = hc.get_codec("sketch:index=bloom")
    n = PART + 20
    plan = codec.expect(n, DType.FLOAT32)
    assert [part.size for part in plan][1] == 20
    assert [run.elements for run in runs_of(plan)] == [slice(0, PART)]
    parts = [sparse(n, 0.005, seed=r, whole=True) for r in range(2)]
    for part in parts:
        part[PART:] = np.arange(20)
    np.testing.assert_array_equal(reduce_all(codec, parts)[1].total, parts[0] + parts[1])


def test_parts_of_one_layout_are_one_run():
    codec = hc.get_codec("sketch:index=bloom")
    plan = codec.expect(3 * PART + 70_000, DType.FLOAT64)
    runs = runs_of(plan)
    assert [run.elements for run in runs] == [slice(0, 3 * PART), slice(3 * PART, 3 * PART + 70_000)]
    assert [run.words.stop - run.words.start for run in runs] == [
        3 * plan[0].filter.words,
        plan[3].filter.words,
    ]


def test_tensors_of_every_size_are_recovered_nearly_always():
    """Small tables have room for deviations, and for few elements that share all rows."""
    for n in (300, 1000, 5000, 60_000):
        tries = 60
        failed = 0
        for seed in range(tries):
            codec = hc.get_codec("sketch", index="bloom", density=0.03, seed=seed)
            failed += reduce_all(codec, [sparse(n, 0.03, seed=seed)])[0].recovered < 1
        assert failed <= 4, f"{failed} of {tries} of {n} elements"


def test_a_denser_union_than_expected_is_told():
    """With a union denser by half the table is too full to be peeled; results are finite and the same on all ranks."""
    parts = [sparse(100_000, 0.011, seed=r) for r in range(4)]
    results = reduce_all("sketch:index=bloom:density=0.03", parts)
    assert 0 < results[0].recovered < 0.9
    assert len({r.total.tobytes() for r in results}) == 1
    assert np.isfinite(results[0].total).all()
    wrong = np.count_nonzero(np.abs(results[0].total - sum(parts)) > 1e-4)
    held = np.count_nonzero(results[0].total)  # the others were not read, not even as zeros
    assert 0 < wrong <= (1 - results[0].recovered) * held * 1.01


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("density", [0.005, 0.06, 0.5])
def test_overflow_is_seen(bad, density):
    for at in (0, 1234, 4999):
        parts = [sparse(5000, 0.02, seed=r) for r in range(3)]
        parts[1][at] = bad
        codec = hc.get_codec("sketch", index="bloom", density=density)
        with np.errstate(invalid="ignore"):
            results = reduce_all(codec, parts)
        assert len({r.total.tobytes() for r in results}) == 1
        for result in results:
            assert not np.isfinite(result.total[at])


def test_negative_zeros_and_denormals_are_elements():
    x = np.zeros(3000, np.float32)
    x[7], x[2999] = -0.0, 1e-45
    for total in (r.total for r in reduce_all("sketch:index=bloom", [x, x])):
        assert total[2999] == 2 * x[2999] > 0
        assert np.count_nonzero(total) == 1


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"index": "trie"}, "index must be one of bitmap, bloom"),
        ({"index": "bloom", "fpr": 0}, "fpr must be a number from 1e-9 to below 1, not 0"),
        ({"index": "bloom", "fpr": 1.0}, "fpr must be"),
        ({"index": "bloom", "fpr": np.nan}, "fpr must be"),
        ({"index": "bloom", "fpr": True}, "fpr must be"),
        ({"index": "bloom", "fpr": "0.1"}, "fpr must be"),
        ({"index": "bloom", "density": 0}, "density must be a number above 0 and at most 1, not 0"),
        ({"index": "bloom", "density": 1.5}, "density must be"),
        ({"index": "bloom", "form": "packed"}, "form is a parameter of index=bitmap, not of index=bloom"),
        ({"index": "bloom", "lanes": 1}, "lanes is a parameter of index=bitmap"),
        ({"fpr": 0.1}, "fpr is a parameter of index=bloom, not of index=bitmap"),
        ({"density": 0.1}, "density is a parameter of index=bloom"),
    ],
)
def test_parameters(params, what):
    with pytest.raises(ValueError, match=what):
        hc.get_codec("sketch", **params)


def test_specs():
    codec = hc.get_codec("sketch:index=bloom,fpr=0.01,density=0.1")
    assert codec.spec == "sketch:load=0.6:index=bloom:fpr=0.01:density=0.1"
    assert hc.get_codec(codec.spec) == codec
    assert (codec.index, codec.fpr, codec.density) == ("bloom", 0.01, 0.1)
    assert hc.get_codec("sketch:index=bitmap").spec == "sketch:load=0.6"
