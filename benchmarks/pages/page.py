"""Rewrite a part of a page between two markers, or check that it is what the result files say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def rewrite(path: Path, name: str, script: str, made: str) -> None:
    """Write ``made`` between a page's markers of that name; with ``--check`` end the program, by 1 if it is not there.

    Args:
        path: of the page.
        name: of the markers: ``RESULTS``, say.
        script: that writes it, as the first marker says.
        made: Markdown.
    """
    begin, end = f"<!-- {name}: written by benchmarks/pages/{Path(script).name} -->", f"<!-- END {name} -->"
    text = path.read_text(encoding="utf-8")
    start, stop = text.index(begin) + len(begin), text.index(end)
    put(path, f"{text[:start]}\n{made}\n{text[stop:]}")


def put(path: Path, made: str) -> None:
    """Write a page; with ``--check`` end the program, by 1 if it reads otherwise."""
    if "--check" in sys.argv[1:]:
        sys.exit(made != path.read_text(encoding="utf-8"))
    path.write_text(made, encoding="utf-8")
