"""Compare measured and predicted steps of a training to which replicas are added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from resultfile import amend, read

from stepmodel.comparing import Row, cluster_of, predicted


def scaled(out: Path, overheads: Mapping[str, float], say: Callable[[str], None] = print) -> None:
    """Predict the measured trainings by the profile of four hosts, and add the predictions to scaled.json."""
    file = out / "scaled.json"
    found = read(file)
    rows: list[Row] = found["rows"]
    for row in rows:
        row["predicted"] = predicted(row, cluster_of(row, out, overheads)).seconds
        say(
            f"{row['median'] * 1e3:7.1f} ms, predicted {row['predicted'] * 1e3:7.1f} "
            f"({row['predicted'] / row['median']:.2f})  {row['name']}"
        )
    amend(file, found)
