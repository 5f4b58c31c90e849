"""Read the files of the ranks, group them by job, and remove those of jobs that have ended."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridcomp.top.folder import WATCHED, is_file_name, machine, started_at, usable
from hybridcomp.top.snapshot import MOST_BYTES, Snapshot, TornError, from_bytes

_MOST_FILES = 4096
_OLD_SECONDS = 86400.0
_TRIES, _PAUSE = 5, 1e-3  # tries for a file that is being written, and seconds between them


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank of a job, by its file.

    Attributes:
        path: path of the file.
        says: snapshot in the file.
        here: whether it runs on this machine.
        ended: whether its process has ended without removing the file.
    """

    path: Path
    says: Snapshot
    here: bool
    ended: bool

    @property
    def process(self) -> tuple[str, int, int]:
        """Return a key that tells its process from all others."""
        return (self.says.machine, self.says.pid, self.says.started)


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that share communicators: a job.

    Attributes:
        name: launcher's name for the job, else the process id of its lowest rank.
        ranks: ranks in order.
    """

    name: str
    ranks: tuple[Rank, ...]

    @property
    def size(self) -> int:
        """Return the number of its ranks, here and elsewhere."""
        return max(len(self.ranks), *(rank.says.size for rank in self.ranks))

    def is_called(self, name: str) -> bool:
        """Tell whether the job has a name, or a process with this id."""
        return name in (self.name, *(str(rank.says.pid) for rank in self.ranks))


def watch(folder: Path) -> None:
    """Have ranks write their files, for some seconds.

    Raises:
        OSError: the folder does not exist, or is not this user's.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(folder / WATCHED, flags, 0o600)
    try:
        os.utime(file)
    finally:
        os.close(file)


def read_jobs(folders: Iterable[Path], *, shared: bool) -> list[Job]:
    """Return the jobs whose ranks keep their files in some folders, the latest first.

    Files of jobs that have ended, with no rank on another machine, are removed.

    Args:
        folders: folders to look in; those that do not exist are passed over.
        shared: whether the user has named them, so that they need not be private.
    """
    jobs = []
    for ranks in _joined([rank for folder in folders for rank in _read_ranks(folder, shared=shared)]):
        if all(rank.ended for rank in ranks):
            for rank in ranks:
                with suppress(OSError):
                    rank.path.unlink()
            continue
        ordered = tuple(sorted(ranks, key=lambda rank: (rank.says.rank, rank.process)))
        launcher = next((rank.says.launcher for rank in ordered if rank.says.launcher), "")
        jobs.append(Job(launcher or str(ordered[0].says.pid), ordered))
    return sorted(jobs, key=lambda job: -max(rank.says.since for rank in job.ranks))


def tidy(folder: Path) -> None:
    """Remove old files of processes of this machine that were killed, if nobody has watched since."""
    for entry in os.scandir(folder):
        with suppress(OSError):
            if (
                is_file_name(entry.name)
                and time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_SECONDS
            ):
                says = _read(Path(entry.path))
                if says is not None and says.machine == machine() and _ended(says):
                    os.unlink(entry.path)


def _read_ranks(folder: Path, *, shared: bool) -> list[Rank]:
    try:
        if not usable(folder, shared=shared):
            return []
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    found = []
    for name in names[:_MOST_FILES]:
        path = folder / name
        if is_file_name(name) and (says := _read(path)) is not None:
            here = says.machine == machine()
            found.append(Rank(path, says, here, here and _ended(says)))
    return found


def _read(path: Path) -> Snapshot | None:
    """Return the snapshot in a file; None if the file is not this user's, or holds none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_size > MOST_BYTES:
                return None
            return _whole(file)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None


def _whole(file: int) -> Snapshot:
    for _ in range(_TRIES - 1):
        with suppress(TornError):
            return from_bytes(os.pread(file, MOST_BYTES + 1, 0))
        time.sleep(_PAUSE)
    return from_bytes(os.pread(file, MOST_BYTES + 1, 0))


def _ended(says: Snapshot) -> bool:
    if says.started:
        return started_at(says.pid) != says.started
    try:
        os.kill(says.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _joined(ranks: list[Rank]) -> list[list[Rank]]:
    """Return the ranks by job: those that share a communicator, or that one step of a launcher has started."""
    parts: list[tuple[set[str], list[Rank]]] = []
    for rank in ranks:
        marks = {f"file {rank.path}"} | {f"communicator {group.key}" for group in rank.says.groups}
        if rank.says.launcher:
            marks.add(f"launcher {rank.says.launcher}")
        together = [part for part in parts if part[0] & marks]
        parts = [part for part in parts if not part[0] & marks]
        members = [rank]
        for others, more in together:
            marks |= others
            members += more
        parts.append((marks, members))
    return [members for _, members in parts]
