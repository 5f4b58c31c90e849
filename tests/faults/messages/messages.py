"""Damage, truncate, delay or drop one message of an operation: all ranks hold the right bits, or all have an error."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hybridcomp.launcher import find_mpiexec
from tests.faults.compiled import shared_library
from tests.faults.outcome import Outcome

ROOT = Path(__file__).parents[3]
KINDS = ("damage", "truncate", "delay", "drop")
_SECONDS = 100.0  # on a machine with more to do: they take some 10
_SHIM = Path(__file__).with_name("isend.c")
_IN_PYTHON = 0.3  # of scenarios run their steps in Python, as for devices, not in the compiled engine


def scenario(seed: int, cases: int = 12) -> Outcome:
    """Run operations on 2 to 5 ranks, each with a fault in one message; see :mod:`.message_ranks`.

    Args:
        seed: decides ranks, operations, algorithms, codecs, sizes and faults.
        cases: how many operations.

    Raises:
        AssertionError: ranks differ, one has wrong bits or no error, or they do not end.
    """
    draw = random.Random(seed)
    ranks, python = draw.randint(2, 5), draw.random() < _IN_PYTHON
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        command = [
            *(sys.executable, "-m", "tests.faults.messages.message_ranks"),
            *(str(seed), str(cases), str(shared_library(_SHIM)), str(out)),
        ]
        unlike = ("PMI", "HYBRIDCOMP")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
        try:
            done = subprocess.run(
                [find_mpiexec(), "-n", str(ranks), *command],
                cwd=ROOT,
                env=environment
                | {
                    "OMP_NUM_THREADS": "1",
                    "HYBRIDCOMP_SHARED_MEMORY": "0",
                    "HYBRIDCOMP_DEVICES": "1" if python else "0",
                },
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"seed {seed} did not end:\n{late.stdout!r}\n{late.stderr!r}") from late
        assert done.returncode == 0, f"seed {seed}:\n{done.stdout}\n{done.stderr}"
        said = json.loads(out.read_text())
    return Outcome(said["operations"], Counter(said["faults"]), Counter(said["outcomes"]))
