"""Find the launcher of MPI programs, this environment's ``mpiexec``; recognise its ranks, and end them."""

from __future__ import annotations

import os
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
