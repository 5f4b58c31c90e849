"""powersgd: its algebra, its determinism, and what it does with shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.codecs.linear import powersgd
from hybridcomp.codecs.linear.powersgd_start import initial_q
from tests.codecs import common


def low_rank(rows: int, cols: int, rank: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, cols))).astype(np.float32)


@pytest.mark.parametrize("shape", [(64, 48), (7, 300), (300, 7), (1000, 1030), (33, 16, 3, 3)])
def test_a_matrix_of_the_rank_is_kept(shape):
    cols = int(np.prod(shape[1:]))
    x = low_rank(shape[0], cols, 3).reshape(shape)
    y = hc.decode(hc.get_codec("powersgd:rank=4").encode(x))
    assert common.relative_error(x, y) < 1e-5


def test_full_rank_is_exact_to_rounding():
    for shape in [(5, 5), (3, 40), (40, 3), (1, 9), (9, 1)]:
        x = common.gaussian(shape[0] * shape[1]).reshape(shape)
        y = hc.decode(hc.get_codec("powersgd:rank=64").encode(x))
        assert common.relative_error(x, y) < 1e-5


def test_error_is_near_the_best_possible():
    """One iteration from a random start comes near the truncated singular value decomposition."""
    rng = np.random.default_rng(1)
    u, _ = np.linalg.qr(rng.standard_normal((200, 100)))
    v, _ = np.linalg.qr(rng.standard_normal((150, 100)))
    spectrum = 2.0 ** -np.arange(100)
    x = (u * spectrum @ v.T).astype(np.float32)
    best = float(np.linalg.norm(spectrum[4:]) / np.linalg.norm(spectrum))
    error = common.relative_error(x, hc.decode(hc.get_codec("powersgd:rank=4").encode(x)))
    assert best <= error < 4 * best


def test_warm_start_approaches_the_best():
    rng = np.random.default_rng(1)
    x = (low_rank(100, 80, 4) + 0.1 * rng.standard_normal((100, 80))).astype(np.float32)
    singular = np.linalg.svd(x, compute_uv=False)
    best = float(np.linalg.norm(singular[2:]) / np.linalg.norm(singular))
    q = initial_q(80, 2, seed=0)
    out = np.empty_like(x)
    for _ in range(20):
        p = powersgd.start(x, q)
        powersgd.orthogonalize(p)
        q = powersgd.finish(x, p)
    powersgd.reconstruct(p, q, out)
    assert common.relative_error(x, out) < 1.01 * best


def test_linear_steps_reduce_the_sum():
    """Summing P and Q over ranks gives what one rank with the summed matrix would have: that is the point."""
    matrices = [common.gaussian(60 * 40, seed=s).reshape(60, 40) for s in range(3)]
    q = initial_q(40, 4, seed=3)
    p = np.sum([powersgd.start(m, q) for m in matrices], axis=0, dtype=np.float32)
    powersgd.orthogonalize(p)
    q = np.sum([powersgd.finish(m, p) for m in matrices], axis=0, dtype=np.float32)
    got = np.empty((60, 40), np.float32)
    powersgd.reconstruct(p, q, got)

    total = np.sum(matrices, axis=0, dtype=np.float64)
    np.testing.assert_allclose(got, p.astype(np.float64) @ (p.T.astype(np.float64) @ total), atol=2e-5)


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 9])
def test_products_are_numpys(rank, name):
    rng = np.random.default_rng(rank)
    for rows, cols in [(1, 1), (2, 17), (13, 1), (37, 53), (64, 1024), (9, 2100), (130, 16)]:
        m = rng.standard_normal((rows, cols)).astype(np.float32)
        q = rng.standard_normal((cols, rank)).astype(np.float32)
        p = rng.standard_normal((rows, rank)).astype(np.float32)
        wide = m.astype(np.float64)
        out, total = np.empty_like(m), m.copy()
        with common.isa(name):
            start, finish = powersgd.start(m, q), powersgd.finish(m, p)
            powersgd.reconstruct(p, q, out)
            powersgd.reconstruct(p, q, total, add=True)
        np.testing.assert_allclose(start, wide @ q, atol=1e-6 * cols + 1e-5)
        np.testing.assert_allclose(finish, wide.T @ p, atol=1e-6 * rows + 1e-5)
        np.testing.assert_allclose(out, p.astype(np.float64) @ q.T, atol=1e-5)
        np.testing.assert_array_equal(total, m + out)


def test_isas_agree_on_every_step():
    x = common.gaussian(257 * 1031).reshape(257, 1031)
    results = set()
    for name in common.isas():
        with common.isa(name):
            p = powersgd.start(x, initial_q(1031, 5, seed=2))
            raw = p.tobytes()
            powersgd.orthogonalize(p)
            q = powersgd.finish(x, p)
            out = np.empty_like(x)
            powersgd.reconstruct(p, q, out)
            results.add((raw, p.tobytes(), q.tobytes(), out.tobytes()))
    assert len(results) == 1


def test_orthogonalize():
    rng = np.random.default_rng(4)
    p = rng.standard_normal((500, 12)).astype(np.float32)
    p[:, 5] = p[:, 2] + 1e-3 * p[:, 5]  # nearly dependent
    before = p.astype(np.float64)
    powersgd.orthogonalize(p)
    wide = p.astype(np.float64)
    np.testing.assert_allclose(wide.T @ wide, np.eye(12), atol=1e-6)
    np.testing.assert_allclose(wide @ (wide.T @ before), before, atol=1e-4)  # the same span


def test_orthogonalize_gives_up_dependent_columns():
    rng = np.random.default_rng(4)
    p = rng.standard_normal((50, 4)).astype(np.float32)
    p[:, 1] = 0
    p[:, 3] = 3 * p[:, 0] - 2 * p[:, 2]
    powersgd.orthogonalize(p)
    np.testing.assert_allclose(p.T @ p, np.diag([1.0, 0, 1, 0]), atol=1e-6)
    assert not p[:, 1].any()
    assert not p[:, 3].any()
    nothing = np.zeros((5, 3), np.float32)
    powersgd.orthogonalize(nothing)
    assert not nothing.any()


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_scale_does_not_matter(scale):
    x = low_rank(40, 30, 2) * np.float32(scale)
    assert common.relative_error(x, hc.decode(hc.get_codec("powersgd").encode(x))) < 1e-5


def test_all_zero_matrix():
    y = hc.decode(hc.get_codec("powersgd").encode(np.zeros((20, 30), np.float32)))
    assert not y.any()
    assert np.isfinite(y).all()


def test_initial_q():
    q = initial_q(5000, 4, seed=0)
    assert q.shape == (5000, 4)
    assert q.dtype == np.float32
    assert abs(q.mean()) < 0.02
    assert abs(q.std() - 1) < 0.02
    np.testing.assert_array_equal(q, initial_q(5000, 4, seed=0))
    correlation = np.corrcoef(np.concatenate([q.T, initial_q(5000, 4, seed=1).T]))
    assert np.abs(correlation - np.eye(8)).max() < 0.06
    # Pinned: ranks and versions must agree on it.
    expected = np.array([0.539548, 1.042994, 1.5642266, -0.09466867], np.float32)
    np.testing.assert_array_equal(initial_q(1, 4, seed=0)[0], expected)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((3, 4), (3, 4)),
        ((3, 4, 5), (3, 20)),
        ((12,), (3, 4)),
        ((13,), (4, 4)),
        ((16,), (4, 4)),
        ((17,), (4, 5)),
        ((1,), (1, 1)),
        ((0,), (0, 0)),
        ((), (1, 1)),
        ((0, 5), (0, 5)),
        ((5, 0), (5, 0)),
    ],
)
def test_matrix_shape(shape, matrix):
    assert powersgd.matrix_shape(shape) == matrix
    x = common.gaussian(int(np.prod(shape))).reshape(shape)
    assert hc.decode(hc.get_codec("powersgd:rank=64").encode(x)).shape == (x.size,)


def test_flat_arrays_encode_but_policies_pass_on():
    codec = hc.get_codec("powersgd:rank=40")
    x = common.gaussian(1500)
    y = hc.decode(codec.encode(x))
    assert common.relative_error(x, y) < 1e-5
    assert codec.can_carry(DType.FLOAT32, (1500,)) == "it has no matrix shape"
    assert codec.can_carry(DType.FLOAT32, ()) == "it has no matrix shape"
    assert codec.can_carry(DType.FLOAT32, (30, 50)) is None
    assert "floating" in codec.can_carry(DType.INT32, (30, 50))


def test_bound_covers_every_shape():
    for rank in (1, 4, 16, 100):
        codec = hc.get_codec("powersgd", rank=rank)
        for n in (1, 2, 12, 36, 210, 1024, 5040):
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            for shape in [(n,), *((d, n // d) for d in divisors)]:
                assert codec.message_bytes(shape) <= codec.bound(n)
                assert codec.encode(np.ones(shape, np.float32)).size == codec.message_bytes(shape)


@pytest.mark.parametrize("rank", [0, -1, 4097, 2.0, True])
def test_ranks_out_of_range(rank):
    with pytest.raises(ValueError, match="rank must be an integer from 1 to 4096"):
        hc.get_codec("powersgd", rank=rank)


def test_arguments_are_checked():
    m = np.zeros((4, 6), np.float32)
    with pytest.raises(ValueError, match="shape"):
        powersgd.start(m, np.zeros((5, 2), np.float32))
    with pytest.raises(ValueError, match="shape"):
        powersgd.finish(m, np.zeros((5, 2), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        powersgd.start(m.T, np.zeros((4, 2), np.float32))
    with pytest.raises(ValueError, match="float32"):
        powersgd.orthogonalize(np.zeros((4, 2)))


def test_forged_sizes():
    """rows, columns and rank that multiply out of range, or to another count."""
    msg = hc.get_codec("powersgd:rank=2").encode(common.gaussian(36).reshape(6, 6))
    for sizes in [
        (6, 6, 3),
        (2**32, 2**32, 1),
        (2**63, 2, 0),
        (6, 6, 0),
        (36, 1, 2),
        (7, 5, 2),
        (0, 0, 0),
        (6, 6, 2**62),
    ]:
        bad = msg.copy()
        bad[32:56] = np.array(sizes, np.uint64).view(np.uint8)
        with pytest.raises(hc.WireError):
            hc.decode(common.reseal(bad))


@pytest.mark.parametrize("shape", [(700, 1000), (3, 300_000), (1, 270_001), (270_001,), (600_000, 2)])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_go_panel_by_panel(shape, dtype):
    """More elements than a panel: the same factors, and the same values, as from the float32 array."""
    x = common.gaussian(math.prod(shape), "float16").astype(dtype).reshape(shape)
    codec = hc.get_codec("powersgd:rank=2")
    msg, wide = codec.encode(x), codec.encode(x.astype(np.float32))
    np.testing.assert_array_equal(msg[32:], wide[32:])
    expected = hc.decode(wide)
    np.testing.assert_array_equal(hc.decode(msg, out=np.empty(x.size, np.float32)), expected)
    np.testing.assert_array_equal(hc.decode(msg), expected.astype(dtype))
    acc = np.ones(x.size, np.float64 if dtype == "float64" else np.float32)
    hc.decode_add(msg, acc)
    np.testing.assert_array_equal(acc, expected.astype(acc.dtype) + 1)
