"""Measure trainings in labs."""

from __future__ import annotations

import json
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hybridcomp.net import Lab
from stepmodel.cells import Cell

STEPS = 14
WARM = 4  # steps at the start that do not count: allocations, caches, connections
SECONDS = 100.0  # a training that takes longer hangs


def measure(lab: Lab, cell: Cell, profile: Path, data: Path, timeout: float = SECONDS) -> dict[str, Any]:
    """Run a cell's training in a lab of its rate; ``timeout`` is in seconds.

    Returns:
        ``seconds`` of each step after the warm-up, their ``median``, ``losses`` of all steps, traffic of all ranks and
        a step by axis, and the ``command`` to repeat it.

    Raises:
        RuntimeError: the training failed.
        TimeoutExpired: the training took longer.
    """
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            **cell.fields,
            "steps": STEPS,
            "eval_batches": 0,
            "data": data,
            "out": folder,
            "log_every": 100,
        }
        options = [
            text
            for key, value in fields.items()
            for text in (
                f"--{key.replace('_', '-')}",
                *map(str, value if isinstance(value, tuple) else (value,)),
            )
        ]
        command = ["hybridcomp", "train", *options]
        done = lab.mpirun(command, cell.ppn, env={"HYBRIDCOMP_PROFILE": str(profile)}, timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f"{cell.name}: {done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    own = {str(data), folder, "--data", "--out"}  # words of the command that hold for this machine alone
    rows = [line for line in lines if line["kind"] == "train"]
    seconds = [row["step_seconds"] for row in rows[WARM:]]
    first, last = rows[WARM - 1]["wire_bytes"], rows[-1]["wire_bytes"]
    shown = [
        "hybridcomp",
        "lab",
        "-n",
        str(cell.hosts),
        "--ppn",
        str(cell.ppn),
        "--rate",
        cell.rate,
        *(["--cores", cell.cores] if cell.cores != "all" else []),
        "--",
        *command,
    ]
    return {
        "name": cell.name,
        "rate": cell.rate,
        "hosts": cell.hosts,
        "ppn": cell.ppn,
        "fields": cell.fields,
        "seconds": seconds,
        "median": statistics.median(seconds),
        "losses": [row["loss"] for row in rows],
        "wire_bytes": {axis: (last[axis] - first[axis]) / len(seconds) for axis in last},
        "command": shlex.join(text for text in shown if text not in own),
    }
