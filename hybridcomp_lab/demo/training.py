"""Run one training in a lab, and follow it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridcomp.errors import HybridcompError
from hybridcomp.files import Log, read_bytes
from hybridcomp.net import Lab
from hybridcomp.results.record import Follower, RunRecord

POLL_SECONDS = 0.2
SILENCE_SECONDS = 300.0  # a run that writes nothing for that long hangs
LOG_TAIL_LINES = 25


class RunFailedError(HybridcompError, RuntimeError):
    """Training run that failed, with the end of its log."""


def train_in(
    lab: Lab,
    command: Sequence[str],
    ppn: int,
    folder: Path,
    record: RunRecord,
    tick: Callable[[], None],
    *,
    may_fail: Callable[[str], bool] = lambda _: False,
) -> None:
    """Run ``hybridcomp train`` in a lab until it ends.

    Args:
        lab: lab that is up.
        command: command line of a rank, which writes its metrics into ``folder``.
        ppn: ranks on each host.
        folder: existing folder; gets ``log.txt``, the ranks' output.
        record: metrics, filled while the run goes on; its name is the run's.
        tick: called several times a second.
        may_fail: tells by the end of the log whether a run that failed is a result, too.

    Raises:
        RunFailedError: the run failed, or wrote nothing for minutes.
    """
    follower = Follower(folder / "metrics.jsonl", record)
    log = folder / "log.txt"
    with Log(log) as file:
        process = lab.popen(
            list(command), ppn, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            _follow(process, follower, tick, record.name)
        except BaseException:
            lab.end(process)
            raise
    follower.poll()
    if process.returncode != 0 or not record.summary:
        tail = "\n".join(read_bytes(log).decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        if not may_fail(tail):
            raise RunFailedError(
                f"the run {record.name!r} ended with code {process.returncode}; {log} ends with\n{tail}"
            )


def _follow(
    process: subprocess.Popen[bytes], follower: Follower, tick: Callable[[], None], name: str
) -> None:
    """Follow the run's metrics until it ends."""
    last = time.monotonic()
    while process.poll() is None:
        if follower.poll():
            last = time.monotonic()
        elif time.monotonic() - last > SILENCE_SECONDS:
            raise RunFailedError(f"the run {name!r} has written nothing for {SILENCE_SECONDS:g} seconds")
        tick()
        time.sleep(POLL_SECONDS)
