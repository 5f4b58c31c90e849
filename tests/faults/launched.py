"""Run ranks that write what they have done to a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from hybridcomp.launcher import find_mpiexec
from tests.faults.outcome import Outcome

ROOT = Path(__file__).parents[2]


def outcome_of(ranks: int, module: str, *arguments: str, seconds: float, **env: str) -> Outcome:
    """Run a module on some ranks; return what they have done.

    Args:
        ranks: number of ranks.
        module: module to run, whose last argument is the file to write to.
        arguments: arguments before the file.
        seconds: seconds that the ranks may take.
        env: variables of their environment, which has none of hybridcomp's else.

    Raises:
        AssertionError: they do not end in time, or not well; with what they have printed.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP"))}
    what = f"{module} {' '.join(arguments)} on {ranks} ranks"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcome.json")
        try:
            done = subprocess.run(
                [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", module, *arguments, str(out)],
                cwd=ROOT,
                env=clean | {"OMP_NUM_THREADS": "1"} | env,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                restore_signals=False,  # as a lab starts programs
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{what} did not end:\n{late.stdout!r}\n{late.stderr!r}") from late
        assert done.returncode == 0, f"{what}:\n{done.stdout}\n{done.stderr}"
        said = json.loads(out.read_text(encoding="utf-8"))
    return Outcome(said["operations"], Counter(said["faults"]), Counter(said["outcomes"]))
