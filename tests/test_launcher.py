"""Which processes are ranks of a launcher's: told by the environment alone."""

from __future__ import annotations

import pytest

from hybridcomp.launcher import inside_mpi

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
