"""Write files as a process ends, each with the decisions of several communicators."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from hybridcomp.errors import PolicyError, printable
from hybridcomp.files import tell_failure, write_text

Source = TypeVar("Source")


class FilesAtExit(Generic[Source]):
    """Files that this process writes as it ends.

    Args:
        what: contents of the files, for errors: ``"the choices"``.
        text: function that makes a file's text of its sources; ``""`` for no file.
    """

    def __init__(self, what: str, text: Callable[[list[Source]], str]) -> None:
        self._what, self._text = what, text
        self._sources: dict[Path, list[Source]] = {}
        self._lock = threading.Lock()

    def add_source(self, path: str, source: Source) -> None:
        """Have a file written, with this source and others that name the same file.

        Raises:
            PolicyError: the file's folder does not exist.
        """
        file = Path(path).absolute()
        if not os.path.isdir(file.parent) or os.path.isdir(file):
            raise PolicyError(
                f"cannot write {self._what} to {printable(path)}: it is no file of a folder that exists"
            )
        with self._lock:
            if not self._sources:
                atexit.register(tell_failure, self.write)
            self._sources.setdefault(file, []).append(source)

    def write(self) -> None:
        """Write all files: each whole, or not at all.

        Raises:
            PolicyError: a file cannot be written.
        """
        with self._lock:
            sources = {path: list(found) for path, found in self._sources.items()}
        for path, found in sources.items():
            if text := self._text(found):
                write_text(path, text, what=self._what, error=PolicyError)
