"""Ranks of :mod:`.links`: ``python -m tests.faults.links.link_ranks FOLDER HOW`` on every host of a lab.

``HOW`` is JSON: see :class:`~tests.faults.links.links.Case`. A rank reports by files of the folder, since the
launcher's own messages travel over the links as well.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD
_STUCK_SECONDS = 8.0  # seconds beyond the longest end, after which a rank shows where it is stuck
_WAIT_SECONDS = 50.0
_OTHERS_SECONDS = 30.0


class Report:
    """Reports of one rank."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def say(self, what: str, text: str = "") -> None:
        """Write a file that appears with all that is in it."""
        aside = self._folder / f".{what}.{WORLD.rank}"
        aside.write_text(text, encoding="utf-8")
        aside.rename(self._folder / f"{what}.{WORLD.rank}")

    def await_(self, what: str) -> None:
        """Wait until the starter of the ranks gives the word."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not (self._folder / what).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody says {what!r}")
            time.sleep(0.005)

    def await_ranks(self, what: str) -> None:
        """Wait for some time until every rank has said something: the first that ends badly may end the others."""
        deadline = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < deadline:
            if all((self._folder / f"{what}.{rank}").exists() for rank in range(WORLD.size)):
                return
            time.sleep(0.005)

    def attempt(self, what: str, work: Callable[[], str]) -> bool:
        """Say how some work ends; return whether well."""
        began = time.monotonic()
        try:
            kind, text = "right", work()
        except hc.HybridcompError as error:
            kind, text = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
        except AssertionError as error:
            kind, text = "WRONG", str(error)
        self.say(what, json.dumps({"kind": kind, "seconds": time.monotonic() - began, "text": text}))
        return kind == "right"


def operate(comm: hc.Communicator, case: dict[str, Any]) -> str:
    """Do the case's operation; return a digest of this rank's result."""
    n, codec = case["n"], case["codec"]
    values = [
        np.random.default_rng([case["seed"], r]).standard_normal(n).astype(np.float32)
        for r in range(comm.size)
    ]
    x = values[comm.rank].copy()
    if case["op"] == "all_reduce":
        comm.Allreduce(MPI.IN_PLACE, x, codec=codec, algorithm=case["algorithm"])
        want = np.sum(values, axis=0, dtype=np.float64)
    elif case["op"] == "broadcast":
        comm.Bcast(x, 1, codec=codec)
        want = values[1].astype(np.float64)
    else:
        x = np.zeros(n * comm.size, np.float32)
        comm.Allgather(values[comm.rank], x, codec=codec)
        want = np.concatenate(values).astype(np.float64)
    wrong = np.linalg.norm(x - want) / np.linalg.norm(want)
    assert wrong < 0.02, f"off by {wrong}"
    return hashlib.sha256(x.tobytes()).hexdigest()


def main(folder: str, how: str) -> None:
    """Report that this rank is ready, go, and report how that ends; then do it again, once the link is mended."""
    case, report = json.loads(how), Report(folder)
    report.say("pid", str(os.getpid()))
    comm: hc.Communicator | None = None

    def connect() -> str:
        nonlocal comm
        comm = hc.Communicator(WORLD, "none", "dp", timeout=case["timeout"])
        return ""

    if case["fault"] == "vanished":
        report.say("ready")
        report.await_("go")
        report.attempt("first", connect)
        return
    comm = hc.Communicator(WORLD, "none", "dp", timeout=30.0)
    comm.timeout = case["timeout"]
    comm.Barrier()
    faulthandler.dump_traceback_later(
        case["timeout"] + case["lasts"] + _STUCK_SECONDS if case["lasts"] else 100.0
    )
    report.say("ready")
    report.await_("go")
    report.attempt("first", lambda: operate(comm, case))
    if case["again"]:
        report.await_("mended")
        report.attempt("second", lambda: operate(comm, case))
        if not case["leaves"]:
            report.await_ranks("second")


if __name__ == "__main__":
    main(*sys.argv[1:])
