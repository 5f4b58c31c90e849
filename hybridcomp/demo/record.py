"""Read the records of a training run: its ``metrics.jsonl``, whole or as it grows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError

SETTLING_STEPS = 3  # the first steps make connections and allocate; they are not timed


@dataclass
class RunRecord:
    """Metrics of one run; the keys of the rows are those of the trainer's ``metrics.jsonl``.

    Attributes:
        name: name of the run.
        start: the line of kind "start", empty until it is there.
        train: the lines of kind "train", in order.
        evaluations: the lines of kind "eval", in order.
        summary: the line of kind "summary", empty until the run has ended.
        decisions: the lines of kind "decision", in order.
    """

    name: str
    start: dict[str, Any] = field(default_factory=dict)
    train: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add one line."""
        row = json.loads(line)
        kind = row["kind"]
        if kind == "train":
            self.train.append(row)
        elif kind == "eval":
            self.evaluations.append(row)
        elif kind == "decision":
            self.decisions.append(row)
        elif kind == "start":
            self.start = row
        elif kind == "summary":
            self.summary = row

    @property
    def step_seconds(self) -> float:
        """Return the median seconds of a step, once the run has settled; NaN before any step."""
        times = [row["step_seconds"] for row in self.train]
        return float(statistics.median(times[SETTLING_STEPS:] or times or [math.nan]))

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of training, as the run sums it up."""
        return float(self.summary["tokens_per_s"])

    @property
    def val_loss(self) -> float:
        """Return the loss on held-out text at the end, in nats per token."""
        return float(self.summary["val_loss"])

    @property
    def wire_bytes(self) -> dict[str, int]:
        """Return the bytes sent by all ranks on each axis."""
        return {axis: int(value) for axis, value in self.summary["wire_bytes"].items()}


class Follower:
    """Reader of a growing ``metrics.jsonl`` into a record, whole lines only."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self._path = path
        self._record = record
        self._position = 0

    def poll(self) -> bool:
        """Read the new lines and tell whether there were any."""
        found = False
        for line in self._new_lines():
            self._record.add(line)
            found = True
        return found

    def _new_lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._position += end
        for line in data[:end].decode().splitlines():
            if line.strip():
                yield line


def read_run(name: str, path: Path) -> RunRecord:
    """Read the whole ``metrics.jsonl`` at ``path``.

    Raises:
        ConfigError: the file is missing, or the run that wrote it did not end.
    """
    record = RunRecord(name)
    Follower(path, record).poll()
    if not record.summary:
        raise ConfigError(f"{path} has no summary: the run {name!r} did not end, or never started")
    return record
