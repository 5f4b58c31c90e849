"""Watch jobs: have their ranks write their files, and read them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from hybridcomp.errors import ConfigError
from hybridcomp.top.folder import folders, named_folder, usable
from hybridcomp.top.read import Job, read_jobs, watch

_ANSWER_SECONDS = 3.0  # seconds that ranks have to write: they look once a second
_WATCH_SECONDS = 0.5  # seconds between two touches of the file
_PAUSE = 0.05


class Watcher:
    """Reader of the ranks' files, which has the ranks go on writing."""

    def __init__(self, folder: str | None) -> None:
        """Open a folder; None is the one where ranks of this user keep their files.

        Raises:
            ConfigError: there is no such folder.
        """
        self._folders = folders(folder)
        self._shared = folder is not None or named_folder() is not None
        self._watched = -_WATCH_SECONDS
        if self._shared and not self._folders[0].is_dir():
            raise ConfigError(f"there is no folder {self._folders[0]}, where ranks would keep their files")

    def go_on(self) -> None:
        """Have the ranks go on writing; to be called more often than every few seconds.

        Raises:
            ConfigError: the ranks cannot be told.
        """
        if time.monotonic() - self._watched >= _WATCH_SECONDS:
            self._watched = time.monotonic()
            for folder in self._folders:
                self._watch(folder)

    def jobs(self) -> list[Job]:
        """Return the running jobs, the latest first.

        Raises:
            ConfigError: the ranks cannot be told to write.
        """
        self.go_on()
        return read_jobs(self._folders, shared=self._shared)

    def answers(self) -> list[Job]:
        """Return the jobs once all their ranks have written anew, or have had time to."""
        jobs = self.jobs()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not jobs and time.monotonic() < deadline - _ANSWER_SECONDS / 2:
            time.sleep(_PAUSE)  # a file that was removed comes again
            jobs = self.jobs()
        before = _written(jobs)
        while before and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            jobs = self.jobs()
            now = _written(jobs)
            before = {process: at for process, at in before.items() if now.get(process) == at}
        return jobs

    def same(self, job: Job) -> Job | None:
        """Return a job as it is now; None if it has ended."""
        return _same(job, self.jobs())

    def answer(self, job: Job) -> Job:
        """Return a job once all its ranks have written anew, or have had time to."""
        return _same(job, self.answers()) or job

    def _watch(self, folder: Path) -> None:
        try:
            if usable(folder, shared=self._shared):
                watch(folder)
        except OSError as error:
            if self._shared:
                raise ConfigError(f"cannot tell the ranks in {folder} to write: {error.strerror}") from error


def _written(jobs: Iterable[Job]) -> dict[tuple[str, int, int], float]:
    """Return when each rank that has not ended wrote, by its process."""
    return {rank.process: rank.says.at for job in jobs for rank in job.ranks if not rank.ended}


def _same(job: Job, jobs: Iterable[Job]) -> Job | None:
    known = {rank.process for rank in job.ranks}
    return next((other for other in jobs if known & {rank.process for rank in other.ranks}), None)
