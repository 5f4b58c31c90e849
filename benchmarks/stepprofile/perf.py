"""Record the work of all cores by Linux's perf, and read the recording."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hybridcomp.errors import HybridcompError

from .parts import IDLE, OTHERS, Place, part_of_sample

HERTZ = 499  # not a multiple of the frequency of any regular event
_END_SECONDS = 30.0
_LONGEST = 60  # characters shown of a symbol, since C++'s may be very long
_MOST_SECONDS = 3600  # after so long perf ends by itself, even if this process was killed
_HEAD = re.compile(r"\s*(-?\d+)\s+(\d+\.\d+):\s+(\d+)\s*$")
_FRAME = re.compile(r"\s*[0-9a-f]+ (.*) \((.*)\)$")


class PerfError(HybridcompError, RuntimeError):
    """perf is missing, or may not record."""


def find_perf() -> str:
    """Return perf's path.

    Raises:
        PerfError: perf is missing, or this user may not watch all processes.
    """
    perf = shutil.which("perf") or ("/usr/bin/perf" if os.access("/usr/bin/perf", os.X_OK) else None)
    if perf is None:
        raise PerfError("perf is missing: /usr/bin/perf, of Debian's package linux-perf")
    tried = subprocess.run(
        [perf, "record", "-q", "-a", "-e", "cpu-clock", "-o", "/dev/null", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        raise PerfError(f"{perf} may not watch all processes, which takes root: {tried.stderr.strip()[:300]}")
    return perf


class Recording:
    """A recording of all cores; a context manager.

    It begins and ends when a process writes ``enable`` and ``disable`` to ``control``.

    Args:
        perf: path of the program.
        folder: folder for its files, which is made.

    Attributes:
        folder: folder as given.
        control: path of the control pipe.
    """

    def __init__(self, perf: str, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.control = folder / "control"
        self._perf = perf
        self._data = folder / "perf.data"
        self._log = folder / "perf.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Recording:
        os.mkfifo(self.control)
        # cpu-clock is there in virtual machines, too, and also samples idle cores.
        how = f"record -q -a -B -N -g -e cpu-clock -F {HERTZ} -k CLOCK_MONOTONIC -D -1".split()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._perf,
                    *how,
                    "--control",
                    f"fifo:{self.control}",
                    "-o",
                    str(self._data),
                    "sleep",
                    str(_MOST_SECONDS),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def lines(self) -> Iterator[str]:
        """Yield the recording as lines of text, sample by sample, after its end.

        Raises:
            PerfError: the recording cannot be read.
        """
        command = [self._perf, "script", "-i", str(self._data), "-F", "pid,time,period,ip,sym,dso"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode != 0:
            raise PerfError(
                f"{self._data} cannot be read; {self._log}: {self._log.read_text().strip()[:300]}"
            )


class Sample(NamedTuple):
    """A sample of one core.

    Attributes:
        pid: id of the process that it ran.
        time: time in seconds of the monotonic clock.
        seconds: time that it stands for.
        stack: places, innermost first. Outside the kernel only the first is sure: few libraries have frame pointers.
    """

    pid: int
    time: float
    seconds: float
    stack: tuple[Place, ...]


def read(lines: Iterable[str]) -> Iterator[Sample]:
    """Read the samples from what ``perf script`` prints: a head, and a line for each place of its stack."""
    head: re.Match[str] | None = None
    stack: list[Place] = []
    for line in lines:
        found = _HEAD.match(line)
        if found is None:
            if (frame := _FRAME.match(line)) is not None:
                stack.append(Place(frame[1], frame[2]))
            continue
        if head is not None:
            yield _sample(head, stack)
        head, stack = found, []
    if head is not None:
        yield _sample(head, stack)


def _sample(head: re.Match[str], stack: list[Place]) -> Sample:
    return Sample(int(head[1]), float(head[2]), int(head[3]) * 1e-9, tuple(stack))


def by_part(
    samples: Iterable[Sample], ranks: frozenset[int], began: float, ended: float
) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Return the seconds of all cores by part, and by part and function of the ranks, of samples taken in that time."""
    parts: dict[str, float] = defaultdict(float)
    places: dict[tuple[str, str], float] = defaultdict(float)
    for sample in samples:
        if not began <= sample.time <= ended:
            continue
        part = part_of_sample(sample.pid, sample.stack, ranks)
        parts[part] += sample.seconds
        if sample.stack and part not in (OTHERS, IDLE):
            place = sample.stack[0]
            places[part, f"{place.symbol[:_LONGEST]} ({place.library.rpartition('/')[2]})"] += sample.seconds
    return parts, places
