"""Rewrite a part of a page between two markers, or check that it agrees with the result files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for what benchmarks share
from collbench.limits import codec_seconds
from resultfile import read

from hybridcomp.results.provenance import origin, origins

__all__ = [
    "ISAS",
    "RESULTS",
    "ROOT",
    "codec_records",
    "codec_seconds",
    "origin",
    "origins",
    "put",
    "read",
    "result",
    "rewrite",
]
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

ISAS = ("avx512", "avx2", "portable")  # the best first


def codec_records(folder: Path, end: str = "") -> list[dict[str, Any]]:
    """Read the results of benchmarks/codecs.py, a file for each kind of processor, the best instruction set first.

    Args:
        folder: folder that holds ``codecs/<instruction set><end>.json``.
        end: end of the names: ``_sizes``, say.

    Raises:
        FileNotFoundError: there is no such file.
    """
    paths = [folder / "codecs" / f"{isa}{end}.json" for isa in ISAS]
    records = [read(path) for path in paths if path.exists()]
    if not records:
        raise FileNotFoundError(
            f"none of {', '.join(map(str, paths))} is there: make bench-codecs writes one"
        )
    return records


def result(name: str) -> dict[str, Any]:
    """Read a file of results by its path in their folder."""
    return read(RESULTS / name)


def rewrite(path: Path, script: str, **parts: str) -> None:
    """Write the parts between a page's markers; with ``--check`` end the program, with 1 if the page has others.

    Args:
        path: path of the page.
        script: script that writes it, as the first marker of each part says.
        parts: Markdown by the name of its markers: ``RESULTS``, say.
    """
    text = path.read_text(encoding="utf-8")
    for name, made in parts.items():
        begin, end = (
            f"<!-- {name}: written by benchmarks/pages/{Path(script).name} -->",
            f"<!-- END {name} -->",
        )
        start, stop = text.index(begin) + len(begin), text.index(end)
        text = f"{text[:start]}\n{made}\n{text[stop:]}"
    put(path, text)


def put(path: Path, made: str) -> None:
    """Write a page; with ``--check`` end the program, with 1 if the page reads otherwise."""
    if "--check" in sys.argv[1:]:
        sys.exit(made != path.read_text(encoding="utf-8"))
    path.write_text(made, encoding="utf-8")
