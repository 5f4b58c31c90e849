"""Jobs of ranks that are sent signals; afterwards nothing of them may be left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridcomp.launcher import find_mpiexec
from tests.faults.deaths.rank_log import started_at
from tests.warm import python

ROOT = Path(__file__).parents[3]
_MARK = "FAULTS_JOB"  # in the environment of all of a job's processes
_SHARED = Path("/dev/shm")
_MPICH = "mpich_shm_"
_POLL = 0.001
_GONE_SECONDS = 5.0  # seconds for processes to go away once the job has ended


class Job:
    """Ranks under mpiexec, which end with the block.

    Attributes:
        folder: folder of the ranks' files (:mod:`.rank_log`).
    """

    def __init__(self, folder: Path, ranks: int, program: list[str], keep: int | None = None) -> None:
        """Start a program; its last argument will be the folder.

        Args:
            folder: folder for this job alone.
            ranks: number of ranks.
            program: module, and its arguments.
            keep: ranks that live to the end; the launcher then does not see others die. None: it does.
        """
        self.folder = folder
        (folder / "said").mkdir()
        unlike = ("PMI", "HYBRIDCOMP", "MASTER_", "PYTHONUNBUFFERED")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        keeper = [sys.executable, "-m", "tests.net.kept", str(folder / "said"), str(keep)]
        self._shared = set(os.listdir(_SHARED))
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self._launcher = subprocess.Popen(
                [
                    *(find_mpiexec(), "-n", str(ranks)),
                    *([] if keep is None else keeper),
                    *(python(), "-m", *program, str(folder)),
                ],
                cwd=ROOT,
                env=environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", _MARK: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                restore_signals=False,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._launcher.kill()
        self._launcher.wait()
        self._clear()
        if isinstance(value, AssertionError):
            value.add_note(self.told())

    def armed(self, seconds: float) -> None:
        """Wait until the victim asks for its signal."""
        deadline = time.monotonic() + seconds
        while not (self.folder / "armed").exists():
            assert self._launcher.poll() is None, f"the job ended with {self._launcher.returncode} too early"
            assert time.monotonic() < deadline, "the victim has not come to its operation"
            time.sleep(_POLL)

    def send(self, rank: int, number: int) -> None:
        """Send a rank a signal; it may have ended meanwhile."""
        pid, began = json.loads((self.folder / f"pid.{rank}").read_text())
        if started_at(pid) == began:
            os.kill(pid, number)

    def end(self, seconds: float) -> int:
        """Wait for the launcher's end; return its exit status, once nothing of the job is left."""
        try:
            status = self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {seconds:g} s") from None
        deadline = time.monotonic() + _GONE_SECONDS
        while (left := self._left()) or self._files():
            words = {pid: _words(pid) for pid in left}
            assert time.monotonic() < deadline, f"processes are left: {words}; in /dev/shm: {self._files()}"
            time.sleep(0.02)
        return status

    def log(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has written down."""
        path = self.folder / f"log.{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def told(self) -> str:
        """Return all that ranks have written and printed, for a person."""
        logs = [path.read_text() for path in sorted(self.folder.glob("log.*"))]
        output = self._output.read_text(errors="replace")
        return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(logs)) + f"\noutput:\n{output}"

    def _left(self) -> list[int]:
        """Return the processes of this job that are alive; a warm one has the environment of its server."""
        mark = f"{_MARK}={self.folder}\0".encode()
        found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _has(int(entry), mark)]
        for path in self.folder.glob("pid.*"):
            pid, began = json.loads(path.read_text())
            if started_at(pid) == began:
                found.append(pid)
        return [pid for pid in dict.fromkeys(found) if started_at(pid) is not None]

    def _files(self) -> list[str]:
        """Return what is new in shared memory and used by no process."""
        new = [str(_SHARED / name) for name in os.listdir(_SHARED) if name not in self._shared]
        new = [path for path in new if not Path(path).name.startswith(_MPICH)]
        used = _mapped() if new else ""
        return [path for path in new if path not in used]

    def _clear(self) -> None:
        """Remove the segment of the ranks' MPI: MPICH removes it as they end by MPI_Finalize, and not else."""
        for path in self.folder.glob("shared.*"):
            for segment in path.read_text().split():
                if Path(segment).name.startswith(_MPICH):
                    Path(segment).unlink(missing_ok=True)


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return False


def _mapped() -> str:
    texts = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                texts.append(Path(f"/proc/{entry}/maps").read_text(errors="replace"))
            except OSError:
                continue
    return "".join(texts)


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
