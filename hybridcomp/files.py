"""Write files of which readers must never see a part, and files that a user has named."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hybridcomp.errors import ConfigError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that everybody may read: whole, or not at all.

    Raises:
        OSError: the file cannot be written; an earlier one stays as it was.
    """
    number, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, and make its folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
