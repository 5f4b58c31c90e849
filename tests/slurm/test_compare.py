"""``hybridcomp compare`` inside an allocation: by ranks that it has srun start, and by an srun of the user's."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.train.harness import ROOT

pytestmark = pytest.mark.timeout(240)

STEPS = "--steps 10 --warmup 2 --rounds 1 --policies int8:min_bytes=0"
GRADIENTS = 4 * (2 * 64 * 256 + 256 + 64)  # bytes, of the program
# Runs a comparison until it is ended, tells its status and the steps that Slurm still knows of, and goes on with it.
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=slurm-%j.out
source slurm/env.sh
compare=(python -m hybridcomp compare -n 2 {steps} --out runs/interrupted -- python {program} gloo while:{stand})
"${{compare[@]}}" &
echo $! > pid
wait $!
echo "status $?, steps: $(squeue --steps --noheader --job "$SLURM_JOB_ID" --format %i | grep -v -F .batch)."
rm {stand}
"${{compare[@]}}"
"""


def check(told: dict[str, Any]) -> None:
    """Check the results of two ranks, each on a node of its own."""
    base, int8 = told["rows"]
    assert (told["ranks"], told["hosts"], told["backend"]) == (2, 2, "gloo")
    assert all(row["failure"] is None and len(row["curve"]) == 10 for row in told["rows"])
    assert 2 * GRADIENTS < base["between_bytes"] < 2.5 * GRADIENTS
    assert 0.25 * base["between_bytes"] < int8["between_bytes"] < 0.5 * base["between_bytes"]
    assert int8["curve"] == pytest.approx(base["curve"], rel=0.01)


def test_by_an_srun_of_the_user(cluster: Cluster) -> None:
    program = ROOT / "tests/compare/program.py"
    compare = (
        f"python -m hybridcomp compare {STEPS} --json --out runs/salloc -- srun python {program} gloo well"
    )
    shell = shlex.join(["bash", "-c", f"source slurm/env.sh && {compare}"])
    allocation = "salloc --quiet --nodes=2 --ntasks-per-node=1"
    check(json.loads(cluster.command(*shlex.split(f"{allocation} {shell}"), seconds=150)))


def test_ranks_that_srun_starts_end_by_a_signal_and_the_comparison_goes_on(cluster: Cluster) -> None:
    stand = cluster.work / "stand"
    stand.touch()
    script = cluster.work / "compare.sbatch"
    script.write_text(JOB.format(steps=STEPS, program=ROOT / "tests/compare/program.py", stand=stand))
    job = cluster.submit(script.name)
    out = cluster.work / "runs/interrupted"
    output = out / "runs/01-int8_min_bytes=0/output.txt"
    deadline = time.monotonic() + 120

    def standing() -> list[int]:
        text = output.read_text() if output.exists() else ""
        return [int(pid) for pid in re.findall(r"process (\d+) stands still", text)]

    while len(standing()) < 2:
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.1)
    ranks = standing()
    os.kill(int((cluster.work / "pid").read_text()), signal.SIGTERM)
    assert cluster.wait(job, 120)["ExitCode"] == "0:0", cluster.logs()
    log = (cluster.work / f"slurm-{job}.out").read_text()
    assert "interrupted: 1 of 2 runs are kept" in log
    assert f"status {128 + signal.SIGTERM}, steps: ." in log
    assert "Traceback" not in log
    assert "(an earlier call's)" in log
    check(json.loads((out / "results.json").read_text()))
    for pid in ranks:
        assert not os.path.exists(f"/proc/{pid}")
