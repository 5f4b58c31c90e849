"""docs/torch.md and docs/for-pytorch.md: their code runs, and what the one names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.torch.harness import HERE, PATH, ROOT, mpiexec
from tests.warm import python

PAGE = ROOT / "docs" / "torch.md"


def test_the_code_runs():
    done = mpiexec(4, str(HERE.parent / "examples" / "page.py"), str(PAGE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran 10 blocks") == 4, done.stdout


@pytest.mark.long
def test_the_code_of_the_hook_s_user_runs_under_torchrun():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [python(), str(HERE.parent / "examples" / "page.py"), str(ROOT / "docs" / "for-pytorch.md")]
    done = subprocess.run(
        [*launcher, "--no-python", *program],
        env={**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran 1 blocks") == 2, done.stdout


def test_what_it_names_exists():
    import hybridcomp.torch as hct

    names = set(re.findall(r"\bhct\.(\w+)", PAGE.read_text(encoding="utf-8")))
    assert {"HookState", "compress_fsdp"} <= names
    assert [name for name in names if not hasattr(hct, name)] == []


def test_every_example_is_named():
    page = PAGE.read_text(encoding="utf-8")
    assert [
        path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in page
    ] == []
