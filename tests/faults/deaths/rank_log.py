"""Logs that ranks write for the process that sends them signals: a line for each operation, as soon as it has ended."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def started_at(pid: int) -> int | None:
    """Return when a process began, which tells it from a later one of its number; None if it is gone or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


class Log:
    """The file of a rank, in the folder of its job."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Write who this is; MPI is initialised."""
        self._folder, self._rank = folder, rank
        self._file = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        pid = os.getpid()
        self._whole(f"shared.{rank}", "\n".join(sorted(shared())))
        self._whole(f"pid.{rank}", json.dumps([pid, started_at(pid)]))

    def _whole(self, name: str, text: str) -> None:
        beside = self._folder / f".{name}"
        beside.write_text(text)
        beside.rename(self._folder / name)

    def arm(self) -> None:
        """Ask for the signal, some time from now."""
        self._whole("armed", "")

    def say(self, what: str, **about: Any) -> None:
        """Write down anything."""
        os.write(self._file, (json.dumps({"what": what, **about}) + "\n").encode())

    def right(self, what: str, bits: bytes, *, common: bool = True) -> None:
        """Write down that an operation has ended well; ``common`` if all ranks must have the same bits."""
        self.say(what, said="right", bits=digest(bits), common=common)

    def failed(self, what: str, error: BaseException, seconds: float) -> None:
        """Write down an operation's error, and how long it took to come."""
        text = "; ".join([str(error), *getattr(error, "__notes__", [])])
        self.say(what, said=type(error).__name__, text=text, seconds=seconds)

    def leave(self) -> None:
        """Write down that the end of the program is reached, and let keepers go."""
        self.say("end", said="reached")
        (self._folder / "said").mkdir(exist_ok=True)
        (self._folder / "said" / str(self._rank)).touch()


def shared() -> set[str]:
    """Return the files in shared memory that this process has mapped: those of MPI, once it is initialised."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}


def digest(bits: bytes) -> str:
    """Return a digest that tells two results apart."""
    return hashlib.blake2b(bits, digest_size=8).hexdigest()
