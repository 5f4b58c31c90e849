"""docs/torch.md: its code runs, and what it names exists."""

from __future__ import annotations

import re

from tests.torch.harness import HERE, ROOT, mpiexec

PAGE = ROOT / "docs" / "torch.md"


def test_the_code_runs():
    done = mpiexec(4, str(HERE.parent / "examples" / "page.py"), str(PAGE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran 7 blocks") == 4, done.stdout


def test_what_it_links_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


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
