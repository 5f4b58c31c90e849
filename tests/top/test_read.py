"""Files of ranks: whose they are, which job they are of, and when they go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.top import folder as folder_module
from hybridcomp.top.folder import folders, make_folder, started_at, usable
from hybridcomp.top.read import read_jobs, tidy, watch
from hybridcomp.top.snapshot import MOST_BYTES, to_bytes
from tests.top import dead, group, keep, snapshot


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_ranks_that_share_a_communicator_are_one_job(tmp_path: Path) -> None:
    tp, pp = group(key="a"), group(key="b")
    keep(tmp_path, snapshot(3, groups=(tp, pp), size=4))
    keep(tmp_path, snapshot(1, groups=(pp,), size=4))
    keep(tmp_path, snapshot(2, groups=(tp,), size=4))
    keep(tmp_path, snapshot(0, groups=(group(key="c"),), size=1, since=1.0))
    first, second = read_jobs([tmp_path], shared=True)
    assert [rank.says.rank for rank in first.ranks] == [1, 2, 3]
    assert first.size == 4
    assert [rank.says.rank for rank in second.ranks] == [0]
    assert first.name == str(os.getpid())
    assert first.is_called(str(os.getpid()))
    assert not first.is_called("7")


def test_ranks_of_one_launch_are_one_job(tmp_path: Path) -> None:
    for rank in range(2):
        keep(tmp_path, snapshot(rank, groups=(), launcher="4711.0"))
    (job,) = read_jobs([tmp_path], shared=True)
    assert (job.name, len(job.ranks)) == ("4711.0", 2)


def test_files_go_once_their_whole_job_has_died(tmp_path: Path) -> None:
    keep(tmp_path, snapshot(0))
    keep(tmp_path, dead(rank=1))
    keep(tmp_path, dead(rank=2, groups=(group(key="other"),)))
    (job,) = read_jobs([tmp_path], shared=True)
    assert [(rank.says.rank, rank.ended) for rank in job.ranks] == [(0, False), (1, True)]
    assert len(names(tmp_path)) == 2
    keep(tmp_path, dead(rank=0))
    for path in tmp_path.glob(f"*.{started_at(os.getpid())}.json"):
        path.unlink()
    assert read_jobs([tmp_path], shared=True) == []
    assert names(tmp_path) == []


def test_a_process_that_has_ended_is_known_by_its_start(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    begun = started_at(child.pid)
    keep(tmp_path, snapshot(0, pid=child.pid, started=begun))
    assert len(read_jobs([tmp_path], shared=True)) == 1
    child.communicate()
    assert begun
    assert started_at(child.pid) == 0
    assert read_jobs([tmp_path], shared=True) == []


def test_ranks_of_other_machines_stay(tmp_path: Path) -> None:
    keep(tmp_path, dead(rank=1, machine="another", host="there"))
    (job,) = read_jobs([tmp_path], shared=True)
    assert [(rank.here, rank.ended) for rank in job.ranks] == [(False, False)]
    assert names(tmp_path)


def test_what_is_no_rank_s_file_is_passed_over(tmp_path: Path) -> None:
    good = keep(tmp_path, snapshot())
    outside = tmp_path.parent / f"{tmp_path.name}.outside"
    outside.write_bytes(to_bytes(snapshot(1)))
    (tmp_path / "rank.link.1.1.json").symlink_to(outside)
    (tmp_path / "rank.folder.1.1.json").mkdir()
    (tmp_path / "rank.garbage.1.1.json").write_bytes(b"\x00\x01{")
    (tmp_path / "rank.large.1.1.json").write_bytes(b" " * (MOST_BYTES + 1))
    (tmp_path / "other.json").write_bytes(to_bytes(snapshot(1)))
    os.mkfifo(tmp_path / "rank.pipe.1.1.json")  # to open it must not wait
    before = names(tmp_path)
    (job,) = read_jobs([tmp_path], shared=True)
    assert [rank.path for rank in job.ranks] == [good]
    assert names(tmp_path) == before


def test_another_user_s_files_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, snapshot())
    keep(tmp_path, dead(rank=1, groups=()))
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert read_jobs([tmp_path], shared=True) == []
    assert len(names(tmp_path)) == 2


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    keep(folder, snapshot())
    assert read_jobs([folder], shared=False)
    folder.chmod(0o755)
    assert read_jobs([folder], shared=False) == []
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert read_jobs([tmp_path / "link"], shared=False) == []
    assert read_jobs([tmp_path / "nowhere"], shared=False) == []


def test_the_folder_is_made_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir(mode=0o755)
    monkeypatch.delenv("HYBRIDCOMP_TOP", raising=False)
    monkeypatch.setattr(folder_module, "folders", lambda: [tmp_path / "no" / "parent", bad, good])
    assert make_folder() == good
    assert usable(good, shared=False)
    monkeypatch.setattr(folder_module, "folders", lambda: [bad])
    assert make_folder() is None


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "1"):
        monkeypatch.setenv("HYBRIDCOMP_TOP", value)
        assert str(folders()[0]) == f"/tmp/hybridcomp-top-{os.getuid()}"
    monkeypatch.setenv("HYBRIDCOMP_TOP", str(tmp_path / "runs" / "mine"))
    assert make_folder() == tmp_path / "runs" / "mine"
    assert folders("x") == [Path("x").absolute()]


def test_in_a_user_namespace_the_folder_is_the_one_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRIDCOMP_TOP", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "0 1000 1\n1 100000 65536\n")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert [folder.name for folder in folders()[:2]] == ["hybridcomp-top-1000", "hybridcomp-top-0"]


def test_what_was_killed_long_ago_is_tidied_up(tmp_path: Path) -> None:
    old, new = keep(tmp_path, dead(rank=1)), keep(tmp_path, dead(rank=2))
    alive, elsewhere = keep(tmp_path, snapshot(0)), keep(tmp_path, dead(rank=4, machine="another"))
    for path in (old, alive, elsewhere):
        os.utime(path, (1, 1))
    tidy(tmp_path)
    assert names(tmp_path) == sorted(path.name for path in (new, alive, elsewhere))


def test_to_watch_follows_no_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    os.utime(target, (1, 1))
    (tmp_path / "watched").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        watch(tmp_path)
    assert target.stat().st_mtime == 1
