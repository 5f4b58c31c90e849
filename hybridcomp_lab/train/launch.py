"""Start the ranks: replace this process by mpiexec, and let the ranks agree before they train."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from hybridcomp import variables
from hybridcomp.errors import ConfigError
from hybridcomp.launcher import LOOPBACK, check_room, check_world, find_mpiexec

if TYPE_CHECKING:
    from mpi4py import MPI


def exec_under_mpiexec(ranks: int, threads: int, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by mpiexec, which runs ``hybridcomp train`` on ``ranks`` ranks."""
    environment = LOOPBACK | os.environ
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.stdout.isatty():
        environment[variables.TERMINAL.name] = str(shutil.get_terminal_size().columns)
    mpiexec = find_mpiexec()
    check_room(ranks)
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "hybridcomp", "train", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(mpiexec, command, environment)


def check_rank_count(ranks: int, comm: MPI.Comm) -> None:
    """Check that the mesh fits the number of ranks.

    Raises:
        ConfigError: the numbers differ.
    """
    if comm.size == ranks:
        return
    from mpi4py import MPI  # noqa: PLC0415  (is loaded, where there is a communicator)

    check_world(comm.size, MPI.Get_library_version())
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if comm.size == 1 and tasks != "1":
        raise ConfigError(
            f"srun started {tasks} tasks, but MPI sees one: use srun --mpi=pmi2 (MPICH) or --mpi=pmix"
        )
    raise ConfigError(f"dp * pp * tp is {ranks}, but there are {comm.size} ranks")


def gather_text(comm: MPI.Comm, text: str) -> list[str]:
    """Gather the text of every rank on every rank; collective."""
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([mine.size], np.int64), sizes)
    everyone = np.empty(int(sizes.sum()), np.uint8)
    comm.Allgatherv(mine, [everyone, sizes.tolist()])
    ends = np.cumsum(sizes)
    return [
        everyone[end - size : end].tobytes().decode()
        for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)
    ]
