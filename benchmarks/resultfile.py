"""Write and read the files of results; every benchmark writes its own by this module, so that each says its origin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridcomp.files import write_text
from hybridcomp.results.provenance import NOT_RECORDED, provenance


def write(path: Path, content: Mapping[str, Any], kind: str | None = None) -> None:
    """Write results as JSON, with where they come from.

    Args:
        path: path of the file; its folder is made.
        content: results; a fact of :mod:`~hybridcomp.results.provenance` among them counts for the program's own.
        kind: kind of the lab that was measured in; None: that of the lab that this process is in, if any.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps({**provenance(kind), **content}, indent=1) + "\n")


def amend(path: Path, found: Mapping[str, Any]) -> None:
    """Write results that have been read, with what was made of them; where they come from stays as it is.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(found, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read results. A list, the form of the oldest files, becomes their ``rows``."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {"rows": found} if isinstance(found, list) else found


def commits(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the commits of a file whose runs come from several, in the order of the runs."""
    return ", ".join(dict.fromkeys(run.get("commit") or NOT_RECORDED for run in runs))
