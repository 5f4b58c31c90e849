"""A training run that never ran: metrics in the trainer's own format."""

import dataclasses
import json
import math
from pathlib import Path

from hybridcomp_lab.demo import FULL, RunRecord, read_run
from hybridcomp_lab.demo.runner import Outcome

COMM = {
    "axis": "dp", "op": "all_reduce", "codec": "int8:block=128", "reason": "<policy>", "calls": 120,
    "raw_bytes": 10_000_000, "plain_bytes": 10_000_000, "wire_bytes": 2_500_000,
    "encode_seconds": 0.1, "wire_seconds": 1.0, "decode_seconds": 0.1,
}  # fmt: skip


def lines(step_seconds: float, loss: float, megabytes: float, steps: int = 20) -> list[str]:
    """Return metrics of a run that ends at that loss and sends so many megabytes on dp, and a tenth of that on pp."""
    rows: list[dict[str, object]] = [
        {
            "kind": "start",
            "config": {},
            "ranks": 8,
            "mesh": {"pp": 2, "dp": 2, "tp": 2},
            "parameters": 6_500_000,
        }
    ]
    wire = {"dp": 0, "pp": 0, "tp": 0}
    for step in range(1, steps + 1):
        sent = megabytes * step / steps
        wire = {"dp": round(sent * 1e6), "pp": round(sent * 1e5), "tp": 0}
        rows.append(
            {
                "kind": "train", "step": step, "loss": loss + math.exp(-step / 5),
                "lr": 1e-3, "grad_norm": 1.0,
                "tokens": 1024 * step, "step_seconds": step_seconds * (5 if step == 1 else 1),
                "elapsed": step_seconds * step, "tokens_per_s": 1024 / step_seconds,
                "wire_bytes": wire, "plain_bytes": wire,
            }
        )  # fmt: skip
        if step % 10 == 0:
            rows.append({"kind": "eval", "step": step, "loss": loss, "elapsed": step_seconds * step})
    rows.append(
        {
            "kind": "summary", "steps": steps, "seconds": step_seconds * steps,
            "tokens_per_s": 1024 / step_seconds, "val_loss": loss, "wire_bytes": wire, "plain_bytes": wire,
            "policy": "x", "comm": [COMM],
        }
    )  # fmt: skip
    return [json.dumps(row) + "\n" for row in rows]


def record(directory: Path, name: str, step_seconds: float, loss: float, megabytes: float) -> RunRecord:
    path = directory / f"{name}.jsonl"
    path.write_text("".join(lines(step_seconds, loss, megabytes)))
    return read_run(name, path)


def outcome(directory: Path, *, shaped: bool = True) -> Outcome:
    """Return runs: none at 1 s a step, 0.6 s of it the link's; naive diverges; hybrid at 0.5 s, with 1 % more loss."""
    result = Outcome(
        dataclasses.replace(FULL, steps=20), kind="namespaces" if shaped else "shared-memory", seconds=60.0
    )
    if shaped:
        result.records["unshaped"] = record(directory, "unshaped", 0.4, 2.0, 100)
    result.records["none"] = record(directory, "none", 1.0, 2.0, 100)
    result.records["naive"] = record(directory, "naive", 0.4, math.nan, 4)
    result.records["hybrid"] = record(directory, "hybrid", 0.5, 2.02, 10)
    result.commands = {name: f"hybridcomp lab -- {name} <&>" for name in result.records}
    return result
