"""Ranks that run short of threads, memory, open files, address space or shared memory in the middle of operations.

Afterwards every rank has an error or the right bits, within the timeout; a new communicator works; and nothing is left
in the shared memory. ``vm.overcommit_memory=2`` is left out: it is one setting for all processes of a machine.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hybridcomp.launcher import find_mpiexec
from tests.faults.outcome import Outcome
from tests.faults.preload import library
from tests.faults.resources.short import SECONDS, plan_of

ROOT = Path(__file__).parents[3]
_LAUNCH_SECONDS = 58.0
_LATE = 6.0  # beyond the timeout: ranks are asked how far they are, on a busy machine
_MAKING = 40.0
# A shared memory of its own; files that are left there are told.
_PRIVATE = 'mount -t tmpfs -o size="$1" tests /dev/shm; shift; "$@"; status=$?; ls -A /dev/shm > "$LEFT"; exit $status'
_STUCK = "is still in MPI at its exit (making a communicator"
# Words of MPICH and of the C library as they end the process.
_ABORTS = ("Assertion failed in file /mpich", "cannot allocate memory for thread-local data: ABORT")
# Errors that other libraries and Python itself raise.
_ERRORS = ("MemoryError", "RuntimeError", "OSError", "Exception", "BlockingIOError")


@functools.cache
def private_shared_memory() -> bool:
    """Tell whether this process may mount something, in a namespace of its own."""
    return not subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs tests /dev/shm"], capture_output=True, check=False
    ).returncode


def launch(folder: Path, seed: int, size: str = "1g") -> tuple[int, str]:
    """Run the ranks of a seed; return the exit status and what they printed."""
    unlike = ("PMI", "HYBRIDCOMP", "LD_PRELOAD")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = clean | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HYBRIDCOMP_SUMMARY": "0",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [find_mpiexec(), "-n", "2", "-genv", "LD_PRELOAD", str(library()), sys.executable]
    command += ["-m", "tests.faults.resources.short", str(seed), str(folder)]
    left = folder / "left"
    if private_shared_memory():
        command = ["unshare", "-m", "sh", "-c", _PRIVATE, "sh", size, *command]
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env | {"LEFT": str(left)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(_LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait() and -1000
        output.seek(0)
        text = output.read()
    if left.exists():
        text += "".join(f"left in /dev/shm: {name}\n" for name in left.read_text().split())
    return status, text


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the lines that a rank wrote."""
    file = folder / str(rank)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def scenario(seed: int) -> Outcome:
    """Run short of what the seed decides."""
    plan = plan_of(seed)
    outcome = Outcome(faults=Counter({f"short of {plan.kind}": 1}))
    with tempfile.TemporaryDirectory(prefix="hybridcomp-faults-") as made:
        folder = Path(made)
        none_at_start = plan.kind == "shared memory" and plan.early and private_shared_memory()
        status, text = launch(folder, seed, "64k" if none_at_start else "1g")
        ranks = [lines(folder, rank) for rank in range(2)]
    about = f"seed {seed}, {plan}, ended with {status}:\n{text}\n" + "\n".join(
        f"rank {rank}: {line}" for rank, said in enumerate(ranks) for line in said
    )
    if none_at_start:  # MPICH dies of a bus error at its start, of all ranks
        assert status > 0, about
        assert not any(ranks), about
        outcome.outcomes["ended at the start"] += 1
        return outcome
    if status and any(words in text for words in _ABORTS):
        outcome.outcomes["aborted by a library"] += 1
        return outcome
    stuck = _STUCK in text  # then the rank has ended the job
    assert status == 0 or stuck, about
    assert "left in /dev/shm" not in text or stuck, about
    assert all(said and said[-1]["phase"] == "end" for said in ranks), about
    making = [line["ended"] for said in ranks for line in said if line.get("what") == "make"]
    right: list[dict[str, str]] = [{}, {}]
    if stuck or set(making) != {"right"}:
        assert making[0] != "right" or making[1] != "right", about
        assert plan.early, about
    else:
        for rank, said in enumerate(ranks):
            new = [line for line in said if line["phase"] == "new"]
            assert len(new) > 1, about
            assert all(line["ended"] == "right" for line in new), about
            right[rank] = {line["what"]: line["bits"] for line in new}
        for name in ("all_reduce", "all_reduce, later", "all_gather", "broadcast"):
            assert right[0][name] == right[1][name], f"{name}: {about}"
    for rank, said in enumerate(ranks):
        for line in said:
            if (plan.kind, line["phase"], line.get("ended")) == ("memory", "short", "CollectiveTimeoutError"):
                # Whoever waits for a collective that the other rank has begun is told. A send that fails is not sent,
                # and a receive that fails takes nothing: the other side waits for the next one. Later, ranks may be at
                # different operations.
                told_late = line["text"].startswith(("recv number ", "send number "))
                assert told_late or "not arrived: " in line["text"], about
            if line["phase"] in ("before", "short", "after"):
                outcome.outcomes[check(line, right[rank], about)] += 1
    for said in ranks:
        for what, count in zip(("allocations", "threads"), said[-1]["refused"], strict=False):
            outcome.faults[f"{what} refused"] += count
    outcome.operations = max(len(said) for said in ranks) - 2
    return outcome


def check(line: dict[str, Any], right: dict[str, str], about: str) -> str:
    """Check what became of an operation on a rank; return how it ended."""
    what, ended = line["what"], line["ended"]
    of_it = f"{line}\n{about}"
    assert line["seconds"] < (_MAKING if what == "make" else SECONDS + _LATE), of_it
    if ended == "right":
        assert what == "make" or line["bits"] == right.get(what), of_it
    elif not line["ours"]:
        assert ended in _ERRORS, of_it
    elif (
        what != "make" and ended != "NativeUnavailableError"
    ):  # NativeUnavailableError names the codec whose library is missing
        assert any(name in line["text"] for name in (what.split(",")[0], "recv", "make a new")), of_it
    return ended
