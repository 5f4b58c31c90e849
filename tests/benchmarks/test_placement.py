"""The benchmark of pipelines on hosts that differ: its cases, and its arithmetic."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where its own modules are, as for a script

import placement

from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig


def test_every_case_is_one_where_a_cut_is_predicted_to_help():
    for case in placement.CASES:
        even, planned = placement.planned(case, placement.cluster_for(case, placement.PROFILES)).values()
        check_config(TrainConfig(**planned[0].fields))
        assert planned[0].fields == {**case.fields, "stage_layers": planned[0].fields["stage_layers"]}
        assert planned[1] < 0.95 * even[1], case.name


def test_both_cuts_are_measured_in_turn_and_compared(tmp_path, monkeypatch, capsys):
    labs, cells = [], []

    def lab(hosts, rate, *, kind, cores):
        labs.append((hosts, rate, kind, cores))
        return contextlib.nullcontext()

    def measure(_lab, cell, *_):
        cells.append(cell)
        cut = cell.fields.get("stage_layers")
        seconds = [9.0] * 3 if len(cells) < 3 else [0.2 if cut else 0.4] * 3  # the first round is disturbed
        return {"seconds": seconds, "losses": [2.0, 1.0 if cut else wrong], "command": "hybridcomp lab"}

    monkeypatch.setattr(placement, "Lab", lab)
    monkeypatch.setattr(placement, "measure", measure)
    for wrong, code in ((1.0, 0), (1.1, 1)):
        cells.clear()
        out = tmp_path / "rows.json"
        arguments = ["--case", "processor", "--profiles", str(placement.PROFILES), "--json", str(out)]
        assert placement.main(arguments) == code
        (row,) = json.loads(out.read_text())["cases"]
        assert [cell.fields.get("stage_layers") is not None for cell in cells] == [False, True] * 3
        assert (row["even"]["measured"], row["planner"]["measured"]) == (0.4, 0.2)
        assert row["measured_ratio"] == pytest.approx(2)
        predicted = row["even"]["predicted"] / row["planner"]["predicted"]
        assert row["predicted_ratio"] == pytest.approx(predicted)
        assert row["ratio_error"] == pytest.approx(2 / predicted - 1)
        assert row["loss_difference"] == pytest.approx(abs(1 / wrong - 1))
        assert "2.00 times as fast" in capsys.readouterr().out
    assert labs[0] == (4, "1gbit", "namespaces", "all,all,all,0.25")
