"""Results of recorded runs: figures, differences, advice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridcomp.compare.page import as_json, table_of, write_report
from hybridcomp.compare.plan import BASELINE, Candidate, Plan, candidates_of
from hybridcomp.compare.results import COSTLY, Results, results_of
from hybridcomp.compare.runner import Done
from tests.pages import check_pictures

BASE, INT8, EXACT = candidates_of("int8,exact")
STEPS = 60


def losses(seed: int, above: float = 0.0, noise: float = 0.0) -> list[float]:
    """Return losses that fall, and lie above those without by a drift and noise."""
    steps = np.arange(STEPS)
    own = noise * np.random.default_rng(seed).standard_normal(STEPS)
    return [float(x) for x in 2 + np.exp(-steps / 20) + above + own]


def run(
    candidate: Candidate,
    ms: float,
    loss: list[float],
    number: int = 1,
    *,
    waiting: float = 0.4,
    hosts: int = 2,
    sent: int | None = 60_000_000,
    counted: int | None = None,
) -> Done:
    """Return a run of four ranks, the first half of them on the first host."""
    jitter = np.random.default_rng(number).uniform(0.98, 1.02, STEPS)
    records: list[dict[str, Any]] = [
        {
            "rank": rank,
            "size": 4,
            "host": f"h{rank * hosts // 4}",
            "hostname": "node",
            "backend": "gloo",
            "seconds": [float(x) for x in ms / 1e3 * jitter],
            "loss": loss,
            "not_finite": [],
            "sent_bytes": sent,
            "counted_bytes": counted,
            "counted_all_bytes": counted,
            "memory_bytes": 10**9,
            "device": "cpu",
            "device_memory_bytes": None,
            "waiting": waiting + 0.1 * rank,
        }
        for rank in range(4)
    ]
    return Done(candidate, number, records, None, Path("output.txt"))


def compared(*runs: Done) -> Results:
    order = [one for one in (BASE, INT8, EXACT) if any(run.candidate is one for run in runs)]
    return results_of(order, runs)


def test_figures_of_a_row():
    found = compared(
        run(BASE, 100, losses(0)),
        run(BASE, 110, losses(0), 2),
        run(INT8, 50, losses(0), sent=15_000_000),
        run(INT8, 50, losses(0), 2, sent=15_000_000),
    )
    base, int8 = found.rows
    assert base.step_ms == pytest.approx(105, rel=0.02)
    assert int8.ratios == pytest.approx((2.0, 2.2), rel=0.02)
    assert int8.ratio == pytest.approx(2.1, rel=0.02)
    assert 48 < int8.quantiles[0] < int8.step_ms < int8.quantiles[1] < 52
    assert base.waiting == pytest.approx(0.4)  # of the rank that waits least
    # Two hosts, counted once each, over 60 steps.
    assert base.between_bytes == pytest.approx(2e6)
    assert int8.between_bytes == pytest.approx(5e5)
    assert not int8.counted
    assert (found.ranks, found.hosts, found.repeatable, found.take) == (4, 2, True, INT8)
    assert found.advice == (
        "Take int8, 2.10 times as fast as gloo, with the same losses: "
        "export HYBRIDCOMP_REPLACE=gloo,nccl HYBRIDCOMP_POLICY=int8"
    )
    said, line = found.advice_and_line
    assert (said, line) == ("Take int8, 2.10 times as fast as gloo, with the same losses:", INT8.line)


def test_bytes_that_interfaces_do_not_see_are_ours_and_marked():
    found = compared(
        run(BASE, 100, losses(0), sent=6000),
        run(INT8, 50, losses(0), sent=6000, counted=30_000_000),
    )
    assert found.rows[1].between_bytes == pytest.approx(2e6)  # of all four ranks
    assert found.rows[1].counted
    assert any("marked *" in note for note in found.notes)
    plan = Plan(["python", "train.py"], [BASE, INT8])
    assert [row[4] for row in table_of(found, plan).rows] == ["0.0002", "2*"]


def test_a_difference_within_noise_says_how_many_steps_would_tell_it():
    found = compared(run(BASE, 100, losses(0)), run(INT8, 50, losses(1, 0.0005, 0.02)))
    gap = found.rows[1].gap
    assert gap is not None
    assert not gap.told
    assert gap.steps == 30
    assert gap.needed is not None
    assert gap.needed == math.ceil(60 * (gap.margin / gap.mean) ** 2) > 60
    assert "no difference of the loss that is told from noise" in found.advice


def test_a_difference_beyond_noise_is_told_and_costs():
    found = compared(
        run(BASE, 100, losses(0)),
        run(INT8, 50, losses(1, 0.05, 0.002)),
        run(EXACT, 80, losses(0)),
    )
    gap = found.rows[1].gap
    assert gap is not None
    assert gap.told
    assert gap.mean == pytest.approx(0.05, abs=0.002)
    assert found.advice.startswith("Take exact, 1.25 times")
    alone = compared(run(BASE, 100, losses(0)), run(INT8, 50, losses(1, 0.05, 0.002)))
    assert alone.advice.startswith(
        "Compression does not pay here: int8 is 2.00 times as fast, but its loss ends"
    )


def test_a_higher_loss_within_noise_is_no_cost():
    found = compared(run(BASE, 100, losses(0)), run(INT8, 50, losses(1, 0.03, 0.3)))
    gap = found.rows[1].gap
    assert gap is not None
    assert not gap.told
    assert gap.mean > COSTLY * found.rows[0].end_loss
    assert found.advice.startswith("Take int8")


def test_a_loss_that_diverges_is_no_candidate():
    lost = [*losses(0)[:-1], math.nan]
    found = compared(run(BASE, 100, losses(0)), run(INT8, 50, lost))
    assert found.rows[1].diverged
    assert "int8: the loss was not finite at step 60." in found.notes
    assert "its loss diverged" in found.advice
    assert table_of(found, Plan(["x"], [BASE, INT8])).rows[1][6:] == ("not finite", "diverged", "")
    assert as_json(found, Plan(["x"], [BASE, INT8]))["rows"][1]["end_loss"] is None


def test_of_candidates_that_are_as_fast_the_first_named_is_taken():
    runs = [run(BASE, 100, losses(0)), run(INT8, 50.0, losses(0)), run(EXACT, 49.2, losses(0))]
    assert compared(*runs).advice.startswith("Take int8")
    assert compared(*runs[:2], run(EXACT, 45, losses(0))).advice.startswith("Take exact")


@pytest.mark.parametrize(
    ("waiting", "hosts", "said"),
    [
        (
            0.03,
            2,
            "waiting for other ranks was 3% of a step, so that nothing sent can gain more than 1.03 times",
        ),
        (
            0.4,
            2,
            "waiting for other ranks was 40% of a step, and yet encoding takes what the link would save",
        ),
        (0.4, 1, "all ranks are on one host"),
    ],
)
def test_where_nothing_pays_the_reason_is_said(waiting: float, hosts: int, said: str):
    found = compared(
        run(BASE, 100, losses(0), waiting=waiting, hosts=hosts),
        run(INT8, 99, losses(0), waiting=waiting, hosts=hosts),
    )
    assert found.advice.startswith("Compression does not pay here: ")
    assert said in found.advice
    assert found.advice.endswith("the fastest, int8, is 1.01 times as fast.")


def test_a_gain_that_not_every_round_shows_is_none():
    found = compared(
        run(BASE, 100, losses(0)),
        run(BASE, 100, losses(0), 2),
        run(INT8, 60, losses(0)),
        run(INT8, 101, losses(0), 2),
    )
    assert found.advice.startswith(
        "Nothing is told from noise here: int8 is 1.33 times as fast, but 0.99 to 1.67 times in single rounds."
    )


def test_one_round_has_no_spread_and_says_what_it_cannot_tell():
    plan = Plan(["x"], [BASE, INT8], rounds=1)
    found = compared(run(BASE, 100, losses(0)), run(INT8, 50, losses(0)))
    assert "2.00 times as fast as gloo in the one round that was run, with the same losses" in found.advice
    assert found.repeatable is None
    (note,) = (note for note in found.notes if "--rounds 2" in note)
    assert "cannot be told from noise" in note
    table = table_of(found, plan)
    assert table.rows[1][3] == "2.00"
    assert table.title.endswith("cpu; 60 steps in one round")
    again = compared(
        run(BASE, 100, losses(0)),
        run(BASE, 100, losses(0), 2),
        run(INT8, 50, losses(0)),
        run(INT8, 50, losses(0), 2),
    )
    assert "one round" not in again.advice
    assert not any("--rounds 2" in note for note in again.notes)


def test_one_round_whose_parts_differ_tells_no_gain():
    slow = run(INT8, 50, losses(0))
    late = 4 * STEPS // 5
    for record in slow.records:
        record["seconds"][late:] = [0.11] * (STEPS - late)
    found = compared(run(BASE, 100, losses(0)), slow)
    assert found.rows[1].ratio == pytest.approx(2, rel=0.03)
    assert found.rows[1].parts == pytest.approx((2, 2, 2, 2, 0.91), rel=0.03)
    assert found.advice.startswith("Nothing is told from noise here: int8 is")
    assert "0.92 to 2.00 times in single parts of one run" in found.advice


def test_a_program_whose_loss_is_no_number_as_it_is_is_told_so():
    lost = [*losses(0)[:50], *[math.nan] * 10]
    plan = Plan(["x"], [BASE, INT8], rounds=2)
    found = compared(*(run(one, ms, lost, n) for one, ms in ((BASE, 100), (INT8, 50)) for n in (1, 2)))
    assert "with a loss that is not finite as it is either, so that nothing is told of it" in found.advice
    assert found.repeatable  # what is no number repeats, too
    assert (
        "The program's loss was not finite at 10 of 60 steps, the first of them 51, as it is." in found.notes
    )
    assert "int8: the loss was not finite at 10 of 60 steps, the first of them 51." in found.notes
    assert [row[6:] for row in table_of(found, plan).rows] == [("not finite", "", "")] * 2
    told = as_json(found, plan)["rows"]
    assert [row["not_finite"] for row in told] == [list(range(51, 61))] * 2


def test_losses_that_are_finite_at_the_end_are_compared_and_others_told():
    early = [losses(0)[0], math.inf, *losses(0)[2:]]
    found = compared(run(BASE, 100, early), run(INT8, 50, losses(0)))
    assert found.rows[1].gap is not None
    assert found.rows[1].gap.mean == 0
    assert "The program's loss was not finite at step 2, as it is." in found.notes


def test_runs_that_do_not_repeat_themselves_are_said_to():
    found = compared(
        run(BASE, 100, losses(0)), run(BASE, 100, losses(1, 0, 0.01), 2), run(INT8, 50, losses(0))
    )
    assert found.repeatable is False
    assert any("seed it" in note for note in found.notes)


def test_a_failed_candidate_has_a_row_and_no_advice():
    failed = Done(INT8, 1, [], "the program ended with exit status 1; its output: <b>o.txt", Path("o.txt"))
    found = compared(run(BASE, 100, losses(0)), failed)
    assert found.rows[1].failure is not None
    assert found.advice == "The program failed under every candidate: run it as it is."
    assert found.take is None
    assert table_of(found, Plan(["x"], [BASE, INT8])).rows[1][:2] == ("int8", "failed")


def test_the_page_shows_names_as_text(tmp_path: Path):
    odd = Candidate("<i>$x$", {})
    failed = Done(odd, 1, [], "no <b>luck", Path("o"))
    found = results_of([BASE, INT8, odd], [run(BASE, 100, losses(0)), run(INT8, 50, losses(0)), failed])
    text = write_report(found, Plan(["python", "<u>.py"], [BASE, INT8, odd]), tmp_path).read_text()
    assert "<i>" not in text
    assert "<b>" not in text
    assert "<u>" not in text
    assert "&lt;i&gt;$x$" in text
    assert "<pre>export HYBRIDCOMP_REPLACE=gloo,nccl HYBRIDCOMP_POLICY=int8</pre>" in text
    assert check_pictures(text, 1) == [(tmp_path / "compare.png").read_bytes()]
    assert BASELINE in text
