"""Collectives whose messages are compressed: :class:`Communicator`, its requests and statistics.

Statistics can be used without MPI; the rest loads mpi4py, which initialises it, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybridcomp.collectives.stats import StatRow, merge

if TYPE_CHECKING:
    from hybridcomp.collectives.communicator import Communicator
    from hybridcomp.collectives.execution.mpi_collectives import AVG
    from hybridcomp.collectives.requests import Request

__all__ = ["AVG", "Communicator", "Request", "StatRow", "merge"]

_HOMES = {"Communicator": "communicator", "Request": "requests", "AVG": "execution.mpi_collectives"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
