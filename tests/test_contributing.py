"""CONTRIBUTING.md and docs/architecture.md name files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = set(re.findall(r"`((?:hybridcomp|kernels|tests|benchmarks|docs)/[\w./-]+)`", GUIDE))
# Files in the walk through an all-reduce, which leaves out what lies before the file's own folder.
WALK = set(
    re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|cpp|hpp))`", (ROOT / "docs" / "architecture.md").read_text())
)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_paths_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted(WALK))
def test_files_of_the_walk_exist(path):
    found = [p for folder in ("hybridcomp", "kernels") for p in (ROOT / folder).rglob(Path(path).name)]
    assert any(p.as_posix().endswith(f"/{path}") for p in found)


def test_links_to_headings_are_right():
    headings = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^## (.*)$", GUIDE, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", GUIDE)) <= headings
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    assert set(re.findall(r"CONTRIBUTING\.md#([\w-]+)", architecture)) <= headings
