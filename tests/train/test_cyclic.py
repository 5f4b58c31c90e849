"""Cyclic data parallelism in time-steps: what is alive, which weights are fresh, when totals come."""

from __future__ import annotations

import weakref

import pytest
import torch

from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt, keep_stage
from hybridcomp_lab.train.pipelines.cyclic import (
    LAG,
    alive,
    duties,
    handed,
    is_fresh,
    owner,
    passes,
    sent,
    totals_due,
    weights_from,
)
from hybridcomp_lab.train.pipelines.micro import MicroBatch

SIZES = [2, 4, 8]


@pytest.mark.parametrize("n", SIZES)
def test_activations_are_half_as_many_and_constant(n):
    together, cyclic = alive(n, cyclic=False), alive(n, cyclic=True)
    assert max(together) == n * n
    assert cyclic == [n * (n + 1) // 2] * (2 * n)
    assert max(cyclic) / max(together) == (n + 1) / (2 * n)


@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_autograd_keeps_as_many_stages_alive(n, cyclic):
    shape = ModelShape(vocab_size=11, layers=n, d_model=4, heads=1, seq_len=3)
    stages = [keep_stage(build_gpt(shape, 1), i, n) for i in range(n)]
    tokens = torch.arange(4).view(1, 4)
    workers = [MicroBatch(stages, 1 / n) for _ in range(n)]
    outputs: list[weakref.ref[torch.Tensor]] = []  # outputs of all stages that ever ran
    order, lag, steps = passes(n), LAG if cyclic else 0, 3
    counts = []
    for time in range(lag * (n - 1) + 2 * n * steps):
        now = []
        for number, worker in enumerate(workers):
            local = time - lag * number
            if 0 <= local < 2 * n * steps:
                now.append((worker, order[local % (2 * n)]))
        for worker, which in now:
            if which.direction == "forward":
                worker.run(which, tokens)
                outputs.append(weakref.ref(worker.saved[which.stage][1]))
        counts.append(sum(output() is not None for output in outputs))
        assert counts[-1] == sum(len(worker.saved) for worker in workers)
        for worker, which in now:
            if which.direction == "backward":
                worker.run(which, tokens)
    assert not any(output() is not None for output in outputs)
    assert [worker.peak for worker in workers] == [n] * n
    full = counts[lag * (n - 1) : lag * (n - 1) + 2 * n]  # every worker is at work
    assert full == alive(n, cyclic=cyclic)


@pytest.mark.parametrize(("n", "share"), [(2, 0.75), (4, 0.625), (8, 0.5625)])
def test_share_of_fresh_weights(n, share):
    pairs = [is_fresh(worker, stage, n) for worker in range(1, n + 1) for stage in range(1, n + 1)]
    assert sum(pairs) / len(pairs) == share


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_totals_of_cdp_v2_come_as_they_are_made_and_before_fresh_weights_are_needed(n):
    for worker in range(1, n):
        due = totals_due(worker, n, at_once=True)
        assert [stage for stages in due for stage in stages] == list(range(n, 0, -1))
        for arrives, stages in enumerate(due):
            for stage in stages:
                made = 2 * (n - 1) + passes(n).index(("backward", stage)) + 1  # from the first worker's begin
                assert arrives + LAG * (worker - 1) == made
                assert arrives > passes(n).index(("backward", n))  # the loss of the step is known
                next_forward = 2 * n + stage - 1
                assert (arrives <= next_forward) == is_fresh(worker, stage, n)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_totals_of_cdp_v1_travel_with_the_workers_and_come_before_the_step_that_needs_them(n):
    for worker in range(1, n):
        due = totals_due(worker, n, at_once=False)
        assert due == totals_due(1, n, at_once=True)
        for arrives, stages in enumerate(due):
            for stage in stages:
                assert arrives >= 2 * n  # those of the step before are all taken by then
                assert arrives < 4 * n + stage - 1  # the forward pass of the step after the next


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_messages_of_a_step(n, at_once):
    counts = sent(n, at_once=at_once)
    assert sum(counts) == 2 * n * (n - 1)  # N - 1 partial sums and N - 1 totals of each stage
    if not at_once:
        assert max(counts) <= max(n, 2)  # n - 1 on average
    assert totals_due(n, n, at_once=at_once) == [[]] * 4 * n


@pytest.mark.parametrize("by_stage", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_weights_reach_every_worker_from_their_owner(n, by_stage):
    for stage in range(1, n + 1):
        assert owner(owner(stage, n), n) == stage
        for worker in range(1, n + 1):
            way = [worker]
            while way[-1] != owner(stage, n):
                way.append(weights_from(way[-1], stage, n, by_stage=by_stage))
                assert len(way) <= n
            if by_stage:  # fresh weights come through workers that see them, others through those that do not
                used = {is_fresh(w, stage, n) for w in way if w != owner(stage, n)}
                assert used <= {is_fresh(worker, stage, n)}


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_owners_do_their_duties_in_time(n):
    for stage in range(1, n + 1):
        back, on = duties(stage, n)
        begin = LAG * (owner(stage, n) - 1)  # begin of the owner's step, counted from the first worker's
        total = LAG * (n - 1) + passes(n).index(("backward", stage)) + 1 - 2 * n  # the step before's total
        assert begin + back == total
        assert begin + back + 1 == passes(n).index(("backward", stage))  # worker 1's, in the same step
        assert begin + on + 1 == 2 * n + stage - 1  # its forward pass in the next step
        every_total = LAG * (n - 1) + 2 * n - 2 * n  # all totals of the step before: the norm is known
        assert begin + on >= every_total
        # Weights for the next step's forward passes are handed out at another time than those for backward passes.
        assert on % (2 * n) != back


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_messages_of_a_step_whose_workers_share_stages(n):
    sums = n * n - 1  # a stage's sum goes up the workers and to its owner, which for one is the last worker
    first = (
        n * (2 * n - 1) - 1
    )  # weights in both directions by n hops, those of the last stage once, from worker 1
    assert sum(handed(n, by_stage=False)) == sums + first
    # Fresh weights set out with their owner, which saves the hop to it.
    assert sum(handed(n, by_stage=True)) == sums + first - 2 * (n - 1)
    for by_stage in (False, True):
        counts = handed(n, by_stage=by_stage)
        assert max(counts) * len(counts) <= (2 if n < 4 else 1.34) * sum(counts)
