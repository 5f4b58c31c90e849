from pathlib import Path

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.results.record import Follower, RunRecord, read_run
from tests.demo.fake import lines


def test_a_growing_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = RunRecord("x")
    follower = Follower(path, record)
    assert not follower.poll()
    text = "".join(lines(1.0, 2.0, 1, steps=4))
    cut = text.index('"step": 2') + 3
    path.write_text(text[:cut])
    assert follower.poll()
    assert [row["step"] for row in record.train] == [1]
    assert not follower.poll()
    path.write_text(text)
    assert follower.poll()
    assert [row["step"] for row in record.train] == [1, 2, 3, 4]
    assert record.summary["steps"] == 4


def test_the_first_steps_are_not_timed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines(0.5, 2.0, 1)))
    assert read_run("x", path).step_seconds == 0.5


def test_a_run_that_did_not_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines(0.5, 2.0, 1)[:-1]))
    with pytest.raises(ConfigError, match="did not end"):
        read_run("x", path)
    with pytest.raises(ConfigError, match="did not end"):
        read_run("x", tmp_path / "missing")
