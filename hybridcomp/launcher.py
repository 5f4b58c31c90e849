"""Find the launcher of MPI programs, this environment's ``mpiexec``; recognise and number its ranks, and end them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridcomp import trace
from hybridcomp.errors import ConfigError

LAST_WORDS_SECONDS = 0.3  # from what a rank prints to its abort
# Variables that launchers set for ranks: MPICH's and Slurm's, PMIx's, Open MPI's, Intel MPI's.
_STARTED_BY = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID")
# What each launcher says of a rank: MPICH's and Intel's, Open MPI's, PMIx's, Slurm's.
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")  # a batch script has neither, srun's tasks have both


def find_mpiexec() -> str:
    """Return the mpiexec beside this Python, else the first on PATH.

    Raises:
        ConfigError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise ConfigError(
            f"no mpiexec beside {sys.executable} and none on PATH: "
            "`pip install 'hybridcomp[mpich]'` brings MPICH's, or load the site's MPI"
        )
    return found


def inside_mpi() -> bool:
    """Tell whether an MPI launcher (mpiexec, srun) started this process; does not initialise MPI."""
    if any(name in os.environ for name in _STARTED_BY):
        return True
    return all(name in os.environ for name in _SLURM_STEP) and int(os.environ[_SLURM_STEP[1]]) > 1


def torchrun_variables() -> dict[str, str]:
    """Return what torchrun would tell this rank of its place, by what the launcher that started it says.

    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK``, which is the host's number, where
    ranks are placed host by host. Not where rank 0's store listens.

    Raises:
        ConfigError: the launcher does not say which rank this is.
    """
    rank, size = _said(_RANK), _said(_SIZE)
    if rank is None or size is None:
        raise ConfigError("the launcher says neither by PMI, nor as Open MPI or Slurm do, which rank this is")
    local_rank = _said(_LOCAL_RANK)
    local_size = _said(_LOCAL_SIZE) or _slurm_tasks_here() or size
    host = _said(("SLURM_NODEID",))
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % local_size if local_rank is None else local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size if host is None else host,
    }
    return {name: str(value) for name, value in found.items()}


def _said(names: tuple[str, ...]) -> int | None:
    """Return the number that the first of these variables has which is set."""
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def _slurm_tasks_here() -> int | None:
    """Return how many of the Slurm step's tasks run on this node: of ``2(x3),1``, which is 2, 2, 2 and 1."""
    tasks, node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _said(("SLURM_NODEID",))
    each: list[int] = []
    for count, _, nodes in re.findall(r"(\d+)(\(x(\d+)\))?", tasks):
        each += [int(count)] * min(int(nodes or 1), 1 << 16)
    return each[node] if node is not None and node < len(each) else None


def abort(comm: Any, code: int) -> None:
    """End all ranks of an MPI communicator, once the launcher has passed on what this one has printed.

    MPICH's mpiexec drops output that it has not read when a rank aborts. A trace is written: to abort runs nothing that
    is registered for the exit.
    """
    with suppress(ConfigError):
        trace.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LAST_WORDS_SECONDS)
    comm.Abort(code)
