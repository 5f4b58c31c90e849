"""Modules are loaded once in a process, by one process of a host at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

from hybridcomp.cuda import prepare_in_turn


def test_modules_are_prepared_once_and_under_the_lock() -> None:
    done: list[tuple[str, bool]] = []
    path = Path(tempfile.gettempdir()) / f"hybridcomp-kernels-{os.getuid()}.lock"

    def prepare(name: str) -> None:
        with path.open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                done.append((name, True))
            else:
                done.append((name, False))

    runtime = SimpleNamespace(prepare=prepare)
    for names in (("a", "b"), ("b", "c"), ("a",)):
        prepare_in_turn(names, runtime)  # type: ignore[arg-type]
    assert done == [("a", True), ("b", True), ("c", True)]
