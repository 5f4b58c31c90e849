"""The batch scripts: they are well-formed, and ask for as many ranks as they use."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hybridcomp_lab.train.interrupt import INTERRUPTED

SLURM = Path(__file__).parent.parent / "slurm"
SCRIPTS = sorted(path.name for path in SLURM.iterdir())


def test_scripts_are_there() -> None:
    assert SCRIPTS == [
        "allreduce.sbatch",
        "elastic.sbatch",
        "env.sh",
        "gpu.sbatch",
        "sweep.sbatch",
        "train.sh",
        "train_gpt.sbatch",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n", SLURM / name], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck(name: str) -> None:
    done = subprocess.run(
        ["shellcheck", "-x", f"slurm/{name}"], capture_output=True, text=True, cwd=SLURM.parent, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_private_paths(name: str) -> None:
    text = (SLURM / name).read_text()
    assert not re.findall(r"/(?:home|work|scratch|fsx|gpfs|lustre)\b", text)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(".sbatch")])
def test_options(name: str) -> None:
    text = (SLURM / name).read_text()
    assert text.startswith("#!/bin/bash\n")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", text, re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "time", "output", "requeue", "open-mode"} <= set(options)
    # sbatch stops reading options at the first command
    assert text.rindex("#SBATCH") < text.index("\nset -eo pipefail")


@pytest.mark.parametrize("name", ["train_gpt.sbatch", "sweep.sbatch"])
def test_as_many_ranks_are_used_as_are_asked_for(name: str) -> None:
    text = (SLURM / name).read_text()
    nodes, per_node = (int(re.search(rf"--{key}=(\d+)", text)[1]) for key in ("nodes", "ntasks-per-node"))
    dp, pp, tp = (int(re.search(rf"\b{axis}=(\d+)", text)[1]) for axis in ("dp", "pp", "tp"))
    assert dp * pp * tp == nodes * per_node
    assert per_node % tp == 0


def test_a_sweep_has_a_task_for_every_pair() -> None:
    text = (SLURM / "sweep.sbatch").read_text()
    policies, seeds = (re.search(rf"{name}:-([^}}]+)}}", text)[1].split() for name in ("POLICIES", "SEEDS"))
    assert f"--array=0-{len(policies) * len(seeds) - 1}%2\n" in text


def test_the_scripts_know_the_code_of_a_run_that_was_asked_to_stop() -> None:
    assert f"\ninterrupted={INTERRUPTED}\n" in (SLURM / "train.sh").read_text()


def run_env(directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    script = f"set -e; cd '{directory}'; source '{SLURM}/env.sh'; env"
    clean = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(["bash", "-c", script], env=clean, capture_output=True, text=True, check=False)


def test_env_outside_a_job_needs_nothing(tmp_path: Path) -> None:
    done = run_env(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SLURM_MPI_TYPE=pmi2\n" in done.stdout
    assert "SBATCH_" not in done.stdout


def test_env_in_a_job_wants_the_environment(tmp_path: Path) -> None:
    done = run_env(tmp_path, SLURM_JOB_ID="1")
    assert done.returncode == 1
    assert f"no virtual environment at {tmp_path}/.venv" in done.stderr


def test_env_in_a_job(tmp_path: Path) -> None:
    activate = tmp_path / "venv/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("export ACTIVATED=1\n")
    variables = {"SLURM_CPUS_PER_TASK": "3", "HYBRIDCOMP_INTERFACE": "ib0", "HYBRIDCOMP_CUDA_AWARE": "1"}
    done = run_env(tmp_path, SLURM_JOB_ID="1", HYBRIDCOMP_VENV=str(tmp_path / "venv"), **variables)
    assert done.returncode == 0, done.stderr
    for line in (
        "ACTIVATED=1",
        "OMP_NUM_THREADS=3",
        "SRUN_CPUS_PER_TASK=3",
        "GLOO_SOCKET_IFNAME=ib0",
        "MPIR_CVAR_ENABLE_GPU=1",
    ):
        assert f"{line}\n" in done.stdout
