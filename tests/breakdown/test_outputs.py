"""The table, the JSON and the page say the same."""

from __future__ import annotations

import json
import re

import pytest

from hybridcomp.breakdown import page
from hybridcomp.breakdown.split import aligned, split
from hybridcomp.cli.main import main
from tests.breakdown.making import two_ranks


@pytest.fixture
def run(tmp_path):
    two_ranks(tmp_path / "run")
    return tmp_path / "run"


def test_the_tables(run, capsys):
    assert main(["report", str(run), "--no-picture"]) == 0
    assert not (run / "report.html").exists()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "0 10,000.0 3,000.0 1,000.0 2,000.0 1,000.0 3,000.0 70 %".split() in lines  # noqa: SIM905
    assert "1 10,000.0 8,000.0 0.0 2,000.0 0.0 0.0 20 %".split() in lines  # noqa: SIM905
    assert "mean 10,000.0 5,500.0 500.0 2,000.0 500.0 1,500.0 45 %".split() in lines  # noqa: SIM905
    assert "dp 4,500.0 45 % 500.0 2,000.0 500.0 1,500.0 1,500.0 7,000.0 0".split() in lines  # noqa: SIM905


def test_the_json(run, tmp_path):
    where = tmp_path / "times.json"
    assert main(["report", str(run), "--json", str(where)]) == 0
    (one,) = json.loads(where.read_text())
    assert (one["steps"], one["skipped_steps"], one["steps_by"]) == (1, 0, "the program")
    assert one["ranks"]["waiting"] == {"mean": 1.5, "most": 3.0, "by_rank": {"0": 3.0, "1": 0.0}}
    assert one["axes"]["dp"]["hidden"]["by_rank"]["1"] == pytest.approx(3.0)
    for row in one["per_step"]:
        exposed = sum(sum(parts.values()) for parts in row["exposed"].values())
        assert row["compute"] + exposed == pytest.approx(row["seconds"], abs=1e-6)


def test_the_page_needs_nothing_else_and_shows_what_the_table_says(run):
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", text)
    found = re.search(r"const FIGURES = (.*);\n", text)
    assert found is not None
    figures = json.loads(found[1])
    bars = {one["name"]: one["x"] for one in figures["run0-ranks"]["data"]}
    assert bars == {
        "compute": [3000, 8000],
        "encode": [1000, 0],
        "wire": [2000, 2000],
        "decode": [1000, 0],
        "waiting": [3000, 0],
    }
    for figure in figures["run0-time"].values():
        program = [one for one in figure["data"] if one["name"] in bars]
        for rank in range(2):
            of_rank = [
                x
                for one in program
                for x, y in zip(one["x"], one["y"], strict=True)
                if y < rank + 0.1 and y > rank - 0.3
            ]
            assert sum(of_rank) == pytest.approx(10_000)


def test_a_page_cannot_be_left_by_a_name(run):
    breakdown = split(run, *aligned(run))
    text = page.page([breakdown], "</title><script>alert(1)</script>")
    assert "<script>alert" not in text


def test_a_timeline_of_many_bars_keeps_the_longest(run, monkeypatch):
    monkeypatch.setattr(page, "_MOST_BARS", 3)
    figure = page.timeline(split(run, *aligned(run)), 0)
    assert sum(len(one["x"]) for one in figure["data"]) == 3
    assert "short bars are left out" in figure["layout"]["xaxis"]["title"]["text"]
