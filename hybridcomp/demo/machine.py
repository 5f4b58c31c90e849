"""Describe the machine that a figure was measured on."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("hybridcomp", "numpy", "mpi4py", "mpich", "torch")


def facts(kind: str) -> dict[str, str]:
    """Return the facts that a reader needs to judge a figure; ``kind`` is the lab's."""
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores for this process",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name))),
        "lab": kind,
    }


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
