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
        *(
            "readme.py",
            "codecs_doc.py",
            "ddp_doc.py",
            "study_doc.py",
            "sizes_doc.py",
            "step_profile_doc.py",
            "device_counts_doc.py",
        ),
        *(
            "chaos_doc.py",
            "exact_doc.py",
            "sparse_doc.py",
            "gpu_table.py",
            "examples_doc.py",
            "choosing_doc.py",
            "report_doc.py",
            "plan_doc.py",
            "auto_doc.py",
            "variables_doc.py",
            "mpi_methods_doc.py",
            "elastic_doc.py",
        ),
    ],
)
def test_figures_come_from_the_files(script):
    pages = ROOT / "benchmarks" / "pages"
    folder = [ROOT / "benchmarks" / "results"] if script == "gpu_table.py" else []
    subprocess.run([sys.executable, pages / script, *folder, "--check"], check=True, timeout=30)
