"""CONTRIBUTING.md and docs/architecture.md name files that there are, and the gate runs what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import asked_of, few_of

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = set(re.findall(r"`((?:hybridcomp(?:_lab)?|kernels|tests|benchmarks|docs)/[\w./-]+)`", GUIDE))
# Files in the walk through an all-reduce, which leaves out what lies before the file's own folder.
WALK = set(
    re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|cpp|hpp))`", (ROOT / "docs" / "architecture.md").read_text())
)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_paths_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted(WALK))
def test_files_of_the_walk_exist(path):
    found = [
        p
        for folder in ("hybridcomp", "hybridcomp_lab", "kernels")
        for p in (ROOT / folder).rglob(Path(path).name)
    ]
    assert any(p.as_posix().endswith(f"/{path}") for p in found)


def test_links_to_headings_are_right():
    headings = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^## (.*)$", GUIDE, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", GUIDE)) <= headings
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    assert set(re.findall(r"CONTRIBUTING\.md#([\w-]+)", architecture)) <= headings


class Case:
    """A test as pytest collects it."""

    def __init__(self, name: str, *marks: str) -> None:
        self.nodeid, self._marks = name, marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._marks else None


def made(folder: str) -> list[Case]:
    """Return tests of two files: of as many cases as their number in the first, and of one case each in the second."""
    several = [Case(f"tests/{folder}/test_a.py::test_{n}[{k}]") for n in range(1, 12) for k in range(n)]
    return several + [
        Case(f"tests/{folder}/test_b.py::test_{n}", *["long"] * (n % 5 == 0)) for n in range(40)
    ]


def test_the_few_and_the_quarters_are_all_tests_each_once():
    items = made("policy") + made("torch")
    few = set(few_of(items))
    parts = [asked_of(items, few, part) for part in ("few", "0/4", "1/4", "2/4", "3/4")]
    assert sum(map(len, parts)) == len(items) == len(set().union(*parts))
    quarter = (len(items) - len(few)) / 4
    assert all(0.75 * quarter < len(part) < 1.25 * quarter for part in parts[1:])
    assert asked_of(items, few, "few,2/4") == parts[0] | parts[3]
    assert not any(one.get_closest_marker("long") for one in few)
    names = [one.nodeid.partition("[")[0] for one in few]
    for file, least in {
        "policy/test_a": 11,
        "policy/test_b": 32,
        "torch/test_a": 3,
        "torch/test_b": 8,
    }.items():
        assert len([name for name in names if file in name]) == least == len({n for n in names if file in n})
    for wrong in ("", "4/4", "1", "1/4,", "!1/4", "-1/4"):
        with pytest.raises(pytest.UsageError, match="HC_PART must be few, K/N"):
            asked_of(items, few, wrong)


def test_gates_of_commits_in_a_row_take_turns(tmp_path):
    """In a clone that has all of its history; another, and what is no clone, has a turn that is its commit's."""

    def run(*command: str) -> str:
        who = {
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_CEILING_DIRECTORIES": str(tmp_path),
        }
        who |= {f"GIT_{one}_{what}": "x" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env = {"PATH": os.environ["PATH"], **who}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    (whole / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", whole / ".ci" / "run")
    assert run(str(whole / ".ci" / "run"), "turn") == "0"
    run("git", "init", "-q", str(whole))
    run("git", "-C", str(whole), "add", ".")
    drawn = []
    for turn in (1, 2, 3, 4, 5):
        run("git", "-C", str(whole), "commit", "-q", "--allow-empty", "-m", f"commit {turn}")
        assert run(str(whole / ".ci" / "run"), "turn") == str(turn)
        run("git", "clone", "-q", "--depth", "1", f"file://{whole}", str(shallow))
        drawn.append(int(run(str(shallow / ".ci" / "run"), "turn")))
        assert drawn[-1] == int(run("git", "-C", str(whole), "rev-parse", "HEAD")[:4], 16)
        shutil.rmtree(shallow)
    assert len(set(drawn)) > 1
