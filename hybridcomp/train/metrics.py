"""Write a run's metrics as JSON lines, and count its traffic per axis."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybridcomp.torch as hct


class MetricsFile:
    """File ``metrics.jsonl``; one object per line, written out at once.

    Args:
        path: path of the file.
        resumed_at: step that the run goes on from: lines of later steps are dropped. None starts the file
            anew.
    """

    def __init__(self, path: Path, resumed_at: int | None) -> None:
        kept = "" if resumed_at is None or not path.exists() else _until(path, resumed_at)
        beside = path.with_suffix(".partial")
        beside.write_text(kept, encoding="utf-8")
        os.replace(beside, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line of ``kind``."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _until(path: Path, step: int) -> str:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a killed run left the line half written
        if entry["kind"] != "summary" and entry.get("step", 0) <= step:
            kept.append(line + "\n")
    return "".join(kept)


def local_traffic(axes: Sequence[str]) -> Tensor:
    """Return this rank's bytes so far, int64 [2, axes]: sent on the wire, and uncompressed."""
    counters = torch.zeros(2, len(axes), dtype=torch.int64)
    for row in hct.stats():
        if row.axis in axes:
            column = axes.index(row.axis)
            counters[0, column] += row.wire_bytes
            counters[1, column] += row.plain_bytes
    return counters


def per_axis(counters: Tensor, axes: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return counters [2, axes] in the form of the metrics' fields."""
    wire, plain = counters.tolist()
    return {
        "wire_bytes": {axis: int(n) for axis, n in zip(axes, wire, strict=True)},
        "plain_bytes": {axis: int(n) for axis, n in zip(axes, plain, strict=True)},
    }


class Traffic:
    """Bytes of this rank in training, without those of rehearsal, evaluation and checkpoints.

    Args:
        axes: axes that are counted.

    Attributes:
        earlier: int64 [2, axes], bytes of the run that this one goes on from.
    """

    def __init__(self, axes: Sequence[str]) -> None:
        self._axes = axes
        self.earlier = torch.zeros(2, len(axes), dtype=torch.int64)
        self._aside = local_traffic(axes)

    def total(self) -> Tensor:
        """Return the bytes up to now, int64 [2, axes]."""
        return self.earlier + local_traffic(self._axes) - self._aside

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the messages sent inside."""
        before = local_traffic(self._axes)
        yield
        self._aside += local_traffic(self._axes) - before
