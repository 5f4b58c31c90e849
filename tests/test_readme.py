"""The figures of README.md and of the pages are those of the committed result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "script",
    [
        *("readme.py", "codecs_doc.py", "ddp_doc.py", "study_doc.py", "sizes_doc.py", "step_profile_doc.py"),
        "chaos_doc.py",
    ],
)
def test_figures_come_from_the_files(script):
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "pages" / script, "--check"], check=True, timeout=30
    )
