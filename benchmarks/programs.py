"""Run a PyTorch program across a lab's hosts, and read the result of its first rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridcomp.net import Lab


class CheckError(RuntimeError):
    """A result is wrong."""


def found_by(lab: Lab, command: Sequence[str], ppn: int, timeout: float) -> dict[str, Any]:
    """Run ``command`` with ``--json FILE`` under ``hybridcomp run``, and return the object that it wrote there.

    Args:
        lab: lab that is up.
        command: command of a program that makes its own process group.
        ppn: ranks on each host.
        timeout: time limit in seconds.

    Raises:
        CheckError: the exit code is not 0.
        subprocess.TimeoutExpired: the program took longer.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = ["hybridcomp", "run", "--", *command, "--json", str(file)]
        done = lab.mpirun(words, ppn, timeout=timeout, env={"HYBRIDCOMP_SUMMARY": "0"})
        if done.returncode:
            raise CheckError(
                f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
            )
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
