"""Ranks of a launcher are recognised by the environment alone; and what ranks need of a machine."""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridcomp import launcher
from hybridcomp.errors import ConfigError
from hybridcomp.launcher import (
    SHARED_BYTES,
    check_launcher,
    check_room,
    check_world,
    find_mpiexec,
    inside_mpi,
    reserve_port,
    torchrun_variables,
)

SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}  # variables of a batch script


@pytest.mark.parametrize(
    ("variables", "inside"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "4"}, False),  # torchrun's, which starts no MPI
        ({"PMI_RANK": "0"}, True),
        ({"PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"MPI_LOCALRANKID": "0"}, True),
        (SLURM, False),
        (SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
        (SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_rank_is_known_by_its_launchers_variables(monkeypatch, variables, inside):
    monkeypatch.setattr("os.environ", variables)
    assert inside_mpi() is inside


SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize(
    ("variables", "rank", "size", "local_rank", "local_size", "host"),
    [
        ({"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 5, 6, 1, 2, 2),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4, 3, 4, 0),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            *(1, 4, 1, 2, 0),
        ),
        (SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}, 3, 7, 1, 2, 1),
        (SRUN | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}, 6, 7, 0, 1, 3),
        # srun --mpi=pmi2 sets some of PMI's, too
        (
            SRUN | {"PMI_RANK": "6", "PMI_SIZE": "7", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            *(6, 7, 0, 1, 3),
        ),
    ],
)
def test_a_ranks_place_in_torchruns_variables(
    monkeypatch, variables, rank, size, local_rank, local_size, host
):
    monkeypatch.setattr("os.environ", variables)
    assert torchrun_variables() == {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(host),
    }


def test_a_launcher_that_does_not_number_ranks(monkeypatch):
    monkeypatch.setattr("os.environ", {"MPI_LOCALRANKID": "0"})
    with pytest.raises(ConfigError, match="which rank this is"):
        torchrun_variables()


def test_room(monkeypatch):
    check_room(2)
    free = SimpleNamespace(f_bavail=4 * SHARED_BYTES // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    check_room(4)
    with pytest.raises(
        ConfigError, match=r"takes 27 MiB for 5 ranks in /dev/shm, where 22 MiB are free.*--shm-size"
    ):
        check_room(5)
    monkeypatch.setattr(launcher, "_SHARED", Path("/no/such/folder"))
    with pytest.raises(ConfigError, match=r"/no/such/folder, which cannot be written to.*--shm-size"):
        check_room(1)


def test_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (40, 1024))
    check_room(4)
    with pytest.raises(
        ConfigError, match=r"may open 40 files here, and mpiexec opens 44 for 5 ranks: ulimit -n"
    ):
        check_room(5)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    check_room(5)


def test_a_rank_that_is_alone_though_its_launcher_started_several(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    check_world(2, "MPICH Version: 5.0.2")
    with pytest.raises(
        ConfigError, match=r"started 2 ranks \(PMI_SIZE\).*not the mpiexec of Open MPI v5\.0\.11,"
    ):
        check_world(1, "Open MPI v5.0.11, package: Open MPI x@y")
    monkeypatch.setenv("PMI_SIZE", "1")
    check_world(1, "MPICH Version: 5.0.2")


@pytest.mark.skipif(not launcher._has("mpich"), reason="this environment's MPI is not MPICH from PyPI")
def test_open_mpis_mpiexec_where_there_is_mpich(monkeypatch):
    monkeypatch.setattr(launcher, "_has", lambda package: package == "mpich")
    check_launcher()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="Open MPI's mpiexec has started this process") as caught:
        check_launcher()
    assert str(caught.value).endswith(find_mpiexec())


def in_namespace(mount: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command where a file system is mounted otherwise, for it alone."""
    script = f'{mount} && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "hybridcomp", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_without_shared_memory_one_sentence_says_so(tmp_path):
    none = "mount -t tmpfs -o ro tmpfs /dev/shm"
    little = "mount -t tmpfs -o size=2m tmpfs /dev/shm"
    if in_namespace(little, "--version").returncode:
        pytest.skip("mounts are not allowed here")
    doctor = in_namespace(none, "doctor", "--quick")
    assert doctor.returncode == 1
    assert "problem: MPI keeps what ranks share in /dev/shm, which cannot be written to" in doctor.stdout
    out = tmp_path / "out"
    for command in (
        ["train", "--dp", "2", "--steps", "1", "--out", str(out)],
        ["lab", "-n", "2", "--kind", "shared-memory", "--quiet", "--", "true"],
    ):
        done = in_namespace(little, *command)
        assert done.returncode == 2
        assert done.stderr.startswith(
            f"hybridcomp {command[0]}: error: MPI takes 11 MiB for 2 ranks in /dev/shm"
        )
        assert done.stderr.count("\n") == 1


IP_LOCAL_PORT_RANGE = 51  # Linux 6.3: the ports that a socket is given automatically


def ask_for(port: int) -> socket.socket:
    """Return a socket that may be given this port alone when it asks for any."""
    one = socket.socket()
    one.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    return one


def test_a_reserved_port_goes_to_no_one_who_asks_for_any_and_to_a_server_that_asks_for_it():
    with reserve_port() as reserved, socket.create_server(("127.0.0.1", 0)) as peer:
        port = reserved.getsockname()[1]
        for reuse in (0, 1):
            with ask_for(port) as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                with pytest.raises(OSError, match="Address already in use"):
                    other.bind(("127.0.0.1", 0))
        with ask_for(port) as other, pytest.raises(OSError, match="Cannot assign requested address"):
            other.connect(peer.getsockname())
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port
    with ask_for(port) as other:
        other.bind(("127.0.0.1", 0))


SAY_AND_FAIL = """
import sys
from hybridcomp.native import extension
extension().end_mpi_at_exit(1, bytes(8), int(sys.argv[1]))  # of an address that is not called: the exit fails
sys.stderr.write("why")
sys.exit(3)
"""


def test_the_launcher_is_told_of_a_failure_once_it_has_read_its_cause() -> None:
    """MPICH's mpiexec drops output that it has not read when a rank aborts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", SAY_AND_FAIL, str(theirs.fileno())]
        with subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()]) as process:
            assert process.stderr is not None
            select.select([process.stderr], [], [], 60)
            assert not select.select([ours], [], [], 0.2)[0], "it is told while the cause is not read"
            assert process.stderr.read(3) == b"why"
            assert select.select([ours], [], [], 60)[0]
            assert ours.recv(100) == b"cmd=abort exitcode=3\n"
        assert process.returncode == 3
