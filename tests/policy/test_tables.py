"""Bounds and coders of embedding tables, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.policy import Message, homogenization_index, plan_table, table_policy


def lookups(scale: float, rows: int = 500, n: int = 4000, elements: int = 16) -> np.ndarray:
    rng = np.random.default_rng(1)
    table = (scale * rng.standard_normal((rows, elements))).astype(np.float32)
    return table[np.minimum(rng.zipf(1.3, n), rows) - 1]


@pytest.mark.parametrize("bound", [1e-4, 0.01, 0.05, 0.3])
def test_index_is_the_share_of_distinct_rows_that_merge(bound):
    rows = lookups(0.05)
    rows[7] = -0.0
    rows[8] = 0.0
    step = np.float32(2) * np.float32(bound) * np.float32(1 - 2**-8)
    quantized = np.rint(rows * (np.float32(1) / step))
    before, after = (len(np.unique(a + 0.0, axis=0)) for a in (rows, quantized))
    assert homogenization_index(rows, bound) == 1 - after / before
    assert homogenization_index(torch.from_numpy(rows), bound) == 1 - after / before


@pytest.mark.parametrize("odd", [1e9, np.nan])
def test_rows_that_quantization_cannot_hold_keep_no_others_apart(odd):
    rows = lookups(1e-3)
    rows[::4, 0] = odd
    index = homogenization_index(rows, 0.05)
    apart = len(np.unique(rows[::4], axis=0)) / len(np.unique(rows, axis=0))
    assert 1 - 2 * apart < index < 1


def test_classes_of_the_index():
    bounds = (0.05, 0.03, 0.01)
    for scale, bound in ((1.0, 0.05), (1e-3, 0.01)):  # all rows stay apart, and all become one
        plan = plan_table(lookups(scale))
        assert plan.bound == bound
        assert plan.index == homogenization_index(lookups(scale), bounds[1])
    index = homogenization_index(lookups(0.012), 0.03)
    assert 0.01 < index < 0.9
    for limits, bound in (((index, 1.0), 0.05), ((0.0, index), 0.03), ((0.0, index / 2), 0.01)):
        assert plan_table(lookups(0.012), bounds=bounds, limits=limits).bound == bound


def test_the_coder_of_fewer_bytes():
    again, fresh = lookups(1.0), np.random.default_rng(2).standard_normal((4000, 16)).astype(np.float32)
    for rows, coder in ((again, "lz"), (fresh, "huffman")):
        for given in (rows, torch.from_numpy(rows), torch.from_numpy(rows).to(torch.bfloat16)):
            plan = plan_table(given)
            codec = hc.get_codec(plan.codec)
            sizes = {
                c: len(hc.get_codec(f"bounded:abs={plan.bound},coder={c}").encode(given))
                for c in ("lz", "huffman")
            }
            assert codec.coder == coder == min(sizes, key=sizes.__getitem__)
            assert codec.abs == plan.bound
            assert plan.ratio == rows.size * (2 if given.dtype == torch.bfloat16 else 4) / sizes[coder]
    wide = plan_table(np.zeros((3, 2000), np.float32))  # longer than a row may be
    assert hc.get_codec(wide.codec).coder == "huffman"
    slow, fast = (plan_table(again, rate=rate).codec for rate in (1.0, 1e15))
    assert hc.get_codec(slow).coder == "lz"  # where the link is all that counts
    assert hc.get_codec(fast).abs == 0.05


def chosen(policy, step, phase="forward", axis="emb"):
    choice = policy.choose(Message(axis, "all_to_all", phase, DType.FLOAT32, 4096, step=step))
    return choice.codec


def test_the_bound_falls_in_the_first_steps():
    policy = table_policy("bounded:abs=0.01,coder=lz,vector=32", "emb", until=100)
    factors = {0: 2.0, 24: 2.0, 25: 1.75, 50: 1.5, 75: 1.25, 99: 1.25, 100: 1.0, 10_000: 1.0}
    for step, factor in factors.items():
        codec = chosen(policy, step)
        assert codec == hc.get_codec("bounded", abs=factor * 0.01, coder="lz", vector=32)
    assert policy.changes == (0, 25, 50, 75, 100)
    assert chosen(policy, 3, phase="backward").name == "none"
    assert chosen(policy, 3, axis="dp").name == "none"
    assert chosen(policy, None) == hc.get_codec("bounded:abs=0.01,coder=lz,vector=32")
    constant = table_policy("bounded:abs=0.01,coder=huffman", "emb")
    assert {chosen(constant, step).abs for step in (0, 1, 1000)} == {0.01}
    assert constant.digest != policy.digest
    assert {
        chosen(table_policy("bounded:abs=1.0", "emb", until=3, stages=3, first=4), s).abs for s in range(4)
    } == {
        4.0,
        3.0,
        2.0,
        1.0,
    }


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plan_table(np.zeros(5, np.float32)), r"rows must be floats \[n, elements\].*float32\[5\]"),
        (lambda: plan_table(np.zeros((0, 4), np.float32)), r"at least one row, not float32\[0, 4\]"),
        (lambda: plan_table(np.zeros((2, 4), np.int64)), r"rows must be floats .* not int64\[2, 4\]"),
        (lambda: plan_table(lookups(1), bounds=(0.1, 0.2)), r"bounds must be descending numbers above 0"),
        (lambda: plan_table(lookups(1), bounds=()), r"bounds must be descending numbers above 0, not \[\]"),
        (lambda: plan_table(lookups(1), limits=(0.1,)), r"limits must be 2 ascending numbers, not \[0.1\]"),
        (lambda: plan_table(lookups(1), limits=(0.2, 0.1)), r"limits must be 2 ascending numbers"),
        (
            lambda: plan_table(lookups(1), rate=0),
            r"rate must be a finite number of bytes/s above 0, or None, not 0",
        ),
        (lambda: table_policy("bounded", "emb"), r"codec must be bounded with an absolute bound"),
        (
            lambda: table_policy("int8", "emb"),
            r"codec must be bounded with an absolute bound, not 'int8:block=128'",
        ),
        (lambda: table_policy("bounded:abs=1", "emb", until=-1), r"until must be a whole number from 0"),
        (
            lambda: table_policy("bounded:abs=1", "emb", until=2.5),
            r"until must be a whole number .* not 2.5, 2.0, 4",
        ),
        (
            lambda: table_policy("bounded:abs=1", "emb", until=True),
            r"until must be a whole number .* not True",
        ),
        (lambda: table_policy("bounded:abs=1", "emb", until=9, stages=2.5), r"stages a whole number .* 2.5"),
        (
            lambda: table_policy("bounded:abs=1e308", "emb", until=9),
            r"first times the codec's bound must be finite, not 2.0 \* 1e\+308",
        ),
        (lambda: table_policy("bounded:abs=1", "emb", until=9, first=0.5), r"first a number from 1"),
        (
            lambda: table_policy("bounded:abs=1", "emb", until=3, stages=4),
            r"stages a whole number from 1 to until, not 3, 2.0, 4",
        ),
    ],
)
def test_wrong_input_is_told_in_one_line(call, match):
    with pytest.raises(hc.ConfigError, match=match) as error:
        call()
    assert "\n" not in str(error.value)
