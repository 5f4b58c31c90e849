"""Traces that cannot be split are refused in one line."""

from __future__ import annotations

import json

import pytest

from hybridcomp.cli.main import EXIT_WRONG_INPUT, main
from tests.breakdown.making import Rank, two_ranks

COUNTS = {"bytes": 4, "uncompressed_bytes": 4, "wire_bytes": 2, "codec": "int8", "why": "a test"}


def refused(capsys, *argv: str) -> str:
    assert main(["report", *argv]) == EXIT_WRONG_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_without_traces_has_no_times(tmp_path, capsys):
    summary = {"kind": "summary", "steps": 3, "seconds": 1.5, "tokens_per_s": 1.0, "val_loss": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(summary | {"policy": "hybrid", "comm": []}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "has no traces: with HYBRIDCOMP_TRACE=" in capsys.readouterr().out
    assert "has no traces" in refused(capsys, str(tmp_path), "--json", str(tmp_path / "x.json"))


def test_a_trace_that_is_cut_off(tmp_path, capsys):
    two_ranks(tmp_path)
    path = tmp_path / "trace.1.json"
    path.write_text(path.read_text()[:-200])
    assert f"{path} is cut off, or damaged" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "cat": "operation", "name": "all_reduce", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "operation", "name": "all_reduce", "ts": 1, "dur": -1},
        {"ph": "X", "cat": "operation", "name": "all_reduce", "ts": 1, "dur": 1, "args": {}},
        {"ph": "X", "cat": "operation", "name": "all_reduce", "ts": 1, "dur": 1, "args": 7},
        {
            **{"ph": "X", "cat": "operation", "name": "all_reduce", "ts": 1, "dur": 1},
            "args": COUNTS | {"axis": "dp", "calls": "many"},
        },
        {"ph": "X", "cat": "step", "name": "step", "ts": 1},
    ],
)
def test_a_trace_that_is_damaged(tmp_path, capsys, event):
    one = Rank(0, groups=[])
    one.events.append(event)
    path = one.write(tmp_path)
    assert f"{path} is damaged" in refused(capsys, str(tmp_path))


def test_traces_of_some_ranks(tmp_path, capsys):
    two_ranks(tmp_path)
    (tmp_path / "trace.0.json").unlink()
    assert "has traces of rank 1 but not of rank 0, which took part" in refused(capsys, str(tmp_path))


def test_traces_of_two_runs(tmp_path, capsys):
    two_ranks(tmp_path)
    Rank(1, groups=[{"comm": "other", "ranks": [0, 1]}]).write(tmp_path)
    assert "are of different runs" in refused(capsys, str(tmp_path))
    (tmp_path / "trace.1.json").rename(tmp_path / "trace.first.json")
    Rank(1).write(tmp_path)
    assert "are both of rank 1" in refused(capsys, str(tmp_path))


def test_ranks_of_which_some_have_no_steps(tmp_path, capsys):
    two_ranks(tmp_path)
    Rank(1).write(tmp_path)
    assert "the traces of some ranks have no step" in refused(capsys, str(tmp_path))


def test_operations_that_went_over_something_else(tmp_path, capsys):
    one = Rank(0, groups=[])
    one.span("all_reduce", "operation", 0, 1, axis="dp", calls=3, **COUNTS)
    for at in range(5):
        one.step(at * at, (at + 1) * (at + 1))  # 1, 3, 5, 7 and 9 s, of which the first are passed over
    one.write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "dp     all_reduce  int8       3 " in text
    assert "A step took 8,000 ms, the median of 2 on 1 rank; 10 to 90 %: 7,200 to 8,800 ms" in text
    assert "over gloo or NCCL it is not known for what a rank waited" in text
    why = "has no operations of the backend hybridcomp in its traces"
    assert why in refused(capsys, str(tmp_path), "--json", str(tmp_path / "x.json"))


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    two_ranks(tmp_path)
    where = str(tmp_path / "trace.0.json" / "x.json")  # a folder that is a file
    assert f"cannot write {where}" in refused(capsys, str(tmp_path), "--json", where)


def test_a_wrong_number_of_steps(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--skip", "-1"])
    assert "0 or more" in capsys.readouterr().err
