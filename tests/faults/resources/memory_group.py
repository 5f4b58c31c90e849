"""Ranks in a control group whose memory runs out: the kernel kills one, and the launcher ends the job.

Version 1 of Linux's control groups or version 2, where this process may make one.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hybridcomp.launcher import find_mpiexec
from tests.faults.outcome import Outcome

ROOT = Path(__file__).parents[3]
_END_SECONDS = 50.0
_MIB = 1 << 20
_FILES = Path("/sys/fs/cgroup")
# MPICH leaves its file behind where a rank is killed: in a file system of the job's own.
_PRIVATE = 'mount -t tmpfs tests /dev/shm; exec "$@"'


@functools.cache
def parent_group() -> tuple[Path, str] | None:
    """Find the memory group of this process, and the name of a group's limit; None if no group can be made there."""
    lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in lines:
        found = _FILES / "memory" / lines["memory"].lstrip("/"), "memory.limit_in_bytes"
    else:
        found = _FILES / lines.get("", "").lstrip("/"), "memory.max"
    trial = found[0] / f"hybridcomp-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError:
        return None
    able = (trial / found[1]).exists() and (trial / "cgroup.procs").exists()
    trial.rmdir()
    return found if able else None


def scenario(seed: int) -> Outcome:
    """Run ranks whose arrays grow until their group has no memory left.

    Args:
        seed: decides ranks, codec, and how much memory there is.

    Raises:
        AssertionError: the job does not end, or ends well; a process is left; ranks have different bits.
    """
    found = parent_group()
    if found is None:
        return Outcome(0, Counter({"memory group, not possible here": 1}))
    draw = random.Random(seed)
    ranks, codec = draw.randint(2, 3), draw.choice(["none", "int8", "topk:ratio=0.05", "lossless"])
    limit = ranks * 150 + draw.randint(0, 200)  # MiB; a rank has some 100 at its start
    group = found[0] / f"hybridcomp-{os.getpid()}-{seed}"
    group.mkdir()
    try:
        (group / found[1]).write_text(str(limit * _MIB))
        with tempfile.TemporaryDirectory(prefix="hybridcomp-faults-") as name:
            status, text = _run(Path(name), ranks, codec, lambda: _join(group))
            logs = [_lines(Path(name, str(rank))) for rank in range(ranks)]
        about = f"seed {seed}, {codec}, {ranks} ranks, {limit} MiB, ended with {status}:\n{text}\n{logs}"
        assert status, about
        assert not (group / "cgroup.procs").read_text().split(), f"processes are left: {about}"
    finally:
        _end(group)
    for of_all in zip(*logs, strict=False):
        assert len(set(of_all)) == 1, f"different bits: {about}"
    done = max(map(len, logs))
    return Outcome(done + 1, Counter({"short of a group's memory": 1}), Counter({"right": done, "killed": 1}))


def _run(folder: Path, ranks: int, codec: str, before: Callable[[], None]) -> tuple[int, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP"))}
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "tests.faults.resources.growing"]
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", _PRIVATE, "sh", *command, codec, str(folder)],
            cwd=ROOT,
            env=clean | {"OMP_NUM_THREADS": "1", "HYBRIDCOMP_SUMMARY": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before,  # noqa: PLW1509  (this process has one thread)
        )
        try:
            status = process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = 0  # it did not end by itself
        output.seek(0)
        return status, output.read()


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _lines(file: Path) -> list[str]:
    """Read the digests that a rank has written in full."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line)["bits"] for line in text.splitlines() if line.endswith("}")]


def _end(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (group / "cgroup.procs").read_text().split() and time.monotonic() < deadline:
        time.sleep(0.02)
    group.rmdir()
