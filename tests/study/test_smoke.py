"""The study of policies at reduced size, in the lab: orderings, not magnitudes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.lab
@pytest.mark.timeout(600)
def test_the_reduced_study_shows_what_the_study_is_to_show(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hybridcomp",
            "study",
            ROOT / "studies/policies.toml",
            "--reduced",
            "--out",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    if results["lab"] == "shared-memory":
        pytest.skip("links cannot be shaped on this machine")
    assert done.returncode == 0, done.stdout
    assert len(results["shown"]) == 5
    assert all(one["held"] for one in results["shown"]), done.stdout
