"""Write a run's metrics as JSON lines, and count its traffic per axis."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hybridcomp.torch as hct
from hybridcomp import style
from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import Log, parse_line, read_bytes, set_aside
from hybridcomp.policy.message import MOMENTUM

_LINE = {"kind": str, "step?": float}


class MetricsFile:
    """File ``metrics.jsonl``; one object per line, written out at once.

    A run that goes on never stops for what an earlier one left there: damaged lines are left out, with a warning, and
    the damaged file is kept beside.

    Args:
        path: path of the file.
        resumed_at: step that the run goes on from: lines of later steps are dropped. None starts the file
            anew.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, resumed_at: int | None) -> None:
        self._path = path
        kept = b""
        if resumed_at is not None and os.path.lexists(path):
            kept, wrong = _until(path, resumed_at)
            if wrong:
                aside = set_aside(path)
                more = f", and {len(wrong) - 1} lines more" if len(wrong) > 1 else ""
                style.say(f"hybridcomp train: warning: {wrong[0]}{more}: now {aside}", sys.stderr)
        self._file = Log(path, kept)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line of ``kind``.

        Raises:
            ConfigError: the disk is full, say.
        """
        self._file.append(json.dumps({"kind": kind, **values}) + "\n")

    def drop_after(self, step: int) -> None:
        """Drop the lines of later steps: the run goes on from this one.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._file.close()
        self._file = Log(self._path, _until(self._path, step)[0])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _until(path: Path, step: int) -> tuple[bytes, list[str]]:
    """Return the lines up to a step, and what is wrong with others, or with the file."""
    try:
        data = read_bytes(path)
    except ConfigError as error:
        return b"", [str(error)]
    kept, wrong = [], []
    name = printable(path)
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = parse_line(line, name, number, _LINE)
        except ConfigError as error:
            if number < len(lines):  # a run that was killed left the last one half written
                wrong.append(str(error))
        else:
            if entry["kind"] != "summary" and entry.get("step", 0) <= step:
                kept.append(line + b"\n")
    return b"".join(kept), wrong


def local_traffic(axes: Sequence[str]) -> Tensor:
    """Return this rank's bytes so far, int64 [2, axes]: sent on the wire, and uncompressed.

    Replicas' momenta, which a policy may have in a section of their own, count as their gradients do.
    """
    counters = torch.zeros(2, len(axes), dtype=torch.int64)
    for row in hct.stats():
        axis = "dp" if row.axis == MOMENTUM else row.axis
        if axis in axes:
            column = axes.index(axis)
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
