"""Which processes are ranks of a launcher's: told by the environment alone."""

from __future__ import annotations

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.launcher import inside_mpi, torchrun_variables

SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}  # of a batch script


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
