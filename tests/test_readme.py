"""The README's figures are those of the committed result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_figures_come_from_the_files():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "readme.py", "--check"], check=True, timeout=30)
