"""``hybridcomp report``: tables from metrics and traces, and a merged trace."""

import dataclasses
import json
import time

import pytest

from hybridcomp import trace
from hybridcomp.cli.main import EXIT_WRONG_INPUT, main
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.stats import record


def write_metrics(folder) -> None:
    row = StatRow("dp", "all_reduce", "int8", "policy p", 3, 4_000_000, 8_000_000, 2_000_000)
    summary = {"kind": "summary", "steps": 3, "seconds": 1.5, "tokens_per_s": 1000.0, "val_loss": None}
    summary |= {"policy": "hybrid", "comm": [dataclasses.asdict(row)]}
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps(summary) + "\n")


def write_trace(folder, calls: int) -> None:
    trace.start(folder)
    for _ in range(calls):
        began = time.perf_counter()
        row = StatRow("tp", "all_gather", "fp16", "policy p", 1, 2_000_000, 2_000_000, 1_000_000)
        parts = [("encode", began, began + 0.25), ("decode", began + 1, began + 1.5)]
        record(trace.active(), row, began, began + 2, parts)
    trace.active().span("hook", "bucket", began, began + 1)
    trace.stop()


def report(folder, capsys) -> list[str]:
    assert main(["report", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_metrics_of_a_run(tmp_path, capsys):
    write_metrics(tmp_path / "gpt")
    lines = report(tmp_path / "gpt", capsys)
    assert lines[0] == f"{tmp_path / 'gpt'}: policy hybrid, 3 steps in 1.5 s, 1,000 tokens/s"
    assert lines[1] == "what rank 0 sent in a step, the mean of 3"
    assert lines[4].split()[:9] == ["dp", "all_reduce", "int8", "1", "2.667", "MB", "666.7", "kB", "4"]


def test_traces_beside_metrics_and_below(tmp_path, capsys):
    write_metrics(tmp_path)
    write_trace(tmp_path / "traces", calls=2)
    text = report(tmp_path, capsys)
    at = text.index("by the trace of 1 rank, what it sent")
    row = text[at + 3].split()
    assert row == "tp all_gather fp16 2 4 MB 2 MB 2 0.500 2.500 1.000 policy p".split()  # noqa: SIM905
    merged = tmp_path / "traces" / "trace.json"
    assert text[-2].startswith(f"{merged}: ")
    assert "has no steps in its traces" in text[-1]
    assert json.loads(merged.read_text())["traceEvents"]


def test_the_table_of_traces_is_of_an_average_rank_and_of_a_step(tmp_path, capsys, monkeypatch):
    for rank, calls in enumerate((6, 2)):
        monkeypatch.setattr(trace, "_rank", rank)
        trace.start(tmp_path)
        for _ in range(calls):
            now = time.perf_counter()
            one = StatRow("dp", "all_reduce", "int8", "policy p", 1, 4_000_000, 4_000_000, 1_000_000)
            one.between_bytes = 250_000
            record(trace.active(), one, now, now)
        for _ in range(2):
            trace.active().step("an optimizer")
        trace.stop()
    text = report(tmp_path, capsys)
    assert text[0] == "by the traces of 2 ranks, what an average one sent in a step, the mean of 2"
    assert text[1].split()[8:12] == ["inside", "hosts", "between", "hosts"]
    assert text[3].split()[:12] == "dp all_reduce int8 2 8 MB 2 MB 1.5 MB 500 kB".split()  # noqa: SIM905


def test_spans_that_were_lost_are_told(tmp_path, capsys):
    trace.start(tmp_path, limit=1)
    for _ in range(2):
        trace.active().span("hook", "bucket", 0.0, 1.0)
    trace.stop()
    assert report(tmp_path, capsys)[0] == "1 spans are not in the traces, which were full"


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_run(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / name)]) == EXIT_WRONG_INPUT
    assert "has neither metrics.jsonl nor trace.RANK.json" in capsys.readouterr().err
