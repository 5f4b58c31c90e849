"""Read the records of a training run: its ``metrics.jsonl``, whole or as it grows."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import checked, parse_line, read_bytes

SETTLING_STEPS = 3  # the first steps make connections and allocate; they are not timed
_NUMBERS = {str: float}
_TRAFFIC = {
    **dict.fromkeys(("axis", "op", "codec", "reason"), str),
    **dict.fromkeys(("calls", "raw_bytes", "plain_bytes", "wire_bytes"), int),
    **dict.fromkeys(("encode_seconds", "wire_seconds", "decode_seconds"), float),
}
_KINDS: dict[
    str, Any
] = {  # fields of a line by its kind; those that some runs leave out, or once did, end in "?"
    "start": {"parameters?": int, "config?": dict},
    "train": {
        **dict.fromkeys(("step", "tokens?"), int),
        "loss": float | None,  # NaN where a run diverged
        **dict.fromkeys(("tokens_per_s?", "step_seconds?", "elapsed?"), float),
        **dict.fromkeys(("wire_bytes?", "plain_bytes?"), _NUMBERS),
    },
    "eval": {"step": int, "loss": float | None, "elapsed?": float},
    "decision": {"step": int, **dict.fromkeys(("axis", "op", "name", "codec", "why"), str)},
    "summary": {
        "policy": str,
        "steps": int,
        **dict.fromkeys(("seconds", "tokens_per_s"), float),
        "val_loss": float | None,
        "comm": [_TRAFFIC],
        "wire_bytes?": _NUMBERS,
        "gradient_bytes?": [int],
        "replicas?": {"suppressed?": float | None},
    },
}


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

    def add(self, line: bytes, path: Path, number: int) -> None:
        """Add one line.

        Args:
            line: bytes of the line.
            path: path of its file, for the error.
            number: number of the line there.

        Raises:
            ConfigError: the line is damaged.
        """
        name = printable(path)
        row = parse_line(line, name, number, {"kind": str}, nan=None)
        kind = row["kind"]
        checked(row, _KINDS.get(kind, {}), f"{name}: line {number}")
        if kind in ("train", "eval") and row["loss"] is None:
            row["loss"] = math.nan
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
        """Return the loss on held-out text at the end, in nats per token; NaN without evaluations."""
        loss = self.summary["val_loss"]
        return math.nan if loss is None else float(loss)

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
        self._lines = 0

    def poll(self) -> bool:
        """Read the new lines and tell whether there were any.

        Raises:
            ConfigError: the file cannot be read, or a line is damaged; names the line.
        """
        if not os.path.lexists(self._path):
            return False
        data = read_bytes(self._path, start=self._position)
        end = data.rfind(b"\n") + 1
        self._position += end
        lines = data[:end].split(b"\n")[:-1]
        for line in lines:
            self._lines += 1
            if line.strip():
                self._record.add(line, self._path, self._lines)
        return bool(lines)


def read_run(name: str, path: Path) -> RunRecord:
    """Read the whole ``metrics.jsonl`` at ``path``.

    Raises:
        ConfigError: the file is missing or damaged, or the run that wrote it did not end.
    """
    record = RunRecord(name)
    Follower(path, record).poll()
    if not record.summary:
        raise ConfigError(f"{printable(path)} has no summary: the run {name!r} did not end, or never started")
    return record
