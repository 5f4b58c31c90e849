"""docs/torch.md and docs/for-pytorch.md: their code runs, and what the one names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.harness import HERE, PATH, ROOT, mpiexec
from tests.warm import python

PAGE = ROOT / "docs" / "torch.md"


def blocks(page: Path) -> int:
    """Count the blocks of Python on a page that are to run."""
    text = page.read_text(encoding="utf-8")
    count = text.count("```python\n") - text.count("<!-- not run: ")
    assert count > 0
    return count


def test_the_code_runs():
    done = mpiexec(4, str(HERE.parent / "examples" / "page.py"), str(PAGE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"ran {blocks(PAGE)} blocks\n") == 4, done.stdout


@pytest.mark.long
def test_the_code_of_the_hook_s_user_runs_under_torchrun():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    page = ROOT / "docs" / "for-pytorch.md"
    program = [python(), str(HERE.parent / "examples" / "page.py"), str(page)]
    done = subprocess.run(
        [*launcher, "--no-python", *program],
        env={**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"ran {blocks(page)} blocks\n") == 2, done.stdout


def test_what_it_names_exists():
    import hybridcomp.torch as hct

    names = set(re.findall(r"\bhct\.(\w+)", PAGE.read_text(encoding="utf-8")))
    assert {"HookState", "compress_fsdp"} <= names
    assert [name for name in names if not hasattr(hct, name)] == []


def test_every_example_is_named():
    page = PAGE.read_text(encoding="utf-8") + (ROOT / "docs" / "mpi4py.md").read_text(encoding="utf-8")
    assert [
        path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in page
    ] == []
