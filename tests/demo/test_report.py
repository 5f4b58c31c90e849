import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hybridcomp.results.pictures import smoothed
from hybridcomp.style import LIGHT
from hybridcomp_lab.demo.output import write_report
from hybridcomp_lab.demo.picture import _draw_traffic
from hybridcomp_lab.demo.report import compare
from tests.demo.fake import outcome
from tests.pages import check_pictures


def test_compare(tmp_path: Path) -> None:
    report = compare(outcome(tmp_path))
    none, naive, hybrid = report.rows
    assert report.share == pytest.approx(0.6)
    assert (none.speedup, hybrid.speedup, naive.speedup) == pytest.approx((1, 2, 2.5))
    assert hybrid.loss_change == pytest.approx(0.01)
    assert math.isnan(naive.loss_change)
    assert none.wire_bytes == {"dp": 100_000_000, "pp": 10_000_000, "tp": 0}


def test_the_words_say_what_the_figures_say(tmp_path: Path) -> None:
    text = " ".join(compare(outcome(tmp_path)).sentences)
    assert "60% of the uncompressed step: 1.00 s, against 0.40 s" in text
    assert "hybrid: 2.00 times the tokens per second, a validation loss 1.0% higher, 10.0 times fewer" in text
    assert "naive: 2.50 times the tokens per second, its loss diverged" in text


def test_without_a_shaped_link_speed_is_not_the_point(tmp_path: Path) -> None:
    report = compare(outcome(tmp_path, shaped=False))
    assert report.share is None
    assert "speed is not the point" in " ".join(report.sentences)


def test_the_words_say_how_early_the_losses_are(tmp_path: Path) -> None:
    assert "early in training, which has seen 10,240 tokens" in compare(outcome(tmp_path)).sentences[-1]


def test_axes_of_one_rank_are_not_told(tmp_path: Path) -> None:
    done = outcome(tmp_path)
    done.plan = dataclasses.replace(done.plan, hosts=2, ppn=2, tp=1)
    report = compare(done)
    assert report.headings[5:] == ("dp MB", "pp MB", "seconds")
    assert report.cells[0] == ("none", "1,024", "1.00", "2.000", "", "100.0", "10.0", "20")


def test_cells(tmp_path: Path) -> None:
    report = compare(outcome(tmp_path))
    rows = report.cells
    assert report.headings[5:] == ("dp MB", "pp MB", "tp MB", "seconds")
    assert rows[0] == ("none", "1,024", "1.00", "2.000", "", "100.0", "10.0", "0.0", "20")
    assert rows[1][3:5] == ("nan", "diverged")
    assert rows[2][4] == "+1.0%"


@pytest.mark.parametrize("shaped", [True, False])
def test_files(tmp_path: Path, shaped: bool) -> None:
    report = write_report(outcome(tmp_path, shaped=shaped), tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["none", "naive", "hybrid"]
    assert results["share"] == report.share
    assert results.keys() >= {"commit", "date", "command", "load", "machine"}
    picture = (tmp_path / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    text = (tmp_path / "demo.html").read_text()
    assert check_pictures(text, 1) == [picture]
    for row in report.cells:
        assert "".join(f"<td>{cell}</td>" for cell in row) in text
    assert "&lt;policy&gt;" in text
    assert "hybrid &lt;&amp;&gt;" in text
    assert re.search(r"torch \d", text)


def test_the_highest_bar_has_room_for_its_figure_below_the_title(tmp_path: Path) -> None:
    axes = Figure().subplots()
    _draw_traffic(axes, compare(outcome(tmp_path)), LIGHT)  # in which the last axis sent nothing
    assert axes.get_ylim()[1] > 1.1 * 110


def test_smoothed() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    falling = smoothed([4.0, 3.0, 2.0])
    assert falling[0] == 4.0
    assert 2.0 < falling[2] < falling[1] < 4.0
    assert smoothed([1.0, math.nan, 1.0]) == [1.0]
