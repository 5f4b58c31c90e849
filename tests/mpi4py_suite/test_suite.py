"""mpi4py's own tests of what takes a communicator, from its source distribution, on communicators of ours."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import mpi4py
import pytest

from tests.torch.harness import mpiexec

ROOT = Path(__file__).parents[2]
# By subject; each of them is one start of ranks.
FILES = {
    "collectives": ["cco_buf", "cco_nb_buf", "cco_vec", "cco_nb_vec", "cco_obj"],
    "persistent": ["cco_pr_buf", "cco_pr_vec", "cco_ngh_buf", "cco_ngh_obj", "cco_pr_ngh_buf"],
    "messages": [
        *["p2p_buf", "p2p_buf_matched", "p2p_buf_part", "p2p_obj", "p2p_obj_matched", "msgzero"],
        *["pack", "subclass", "util_pkl5"],
    ],
    "communicators": [
        *["attributes", "cco_buf_inter", "cco_obj_inter", "cco_vec_inter", "comm", "comm_inter", "comm_topo"],
        *["file", "pickle", "ulfm", "win"],
    ],
    "specifications": ["msgspec"],
    "memory": ["io", "rma", "rma_nb", "util_sync"],
}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def suite() -> Path:
    """The folder of the installed version's tests, fetched once."""
    name = f"mpi4py-{mpi4py.__version__}"
    cache = ROOT / "build" / "mpi4py"
    folder = cache / name / "test"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        ask = [
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "mpi4py",
            "--no-build-isolation",
            "-d",
            str(cache),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *ask, name.replace("-", "==")],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, (
            f"pip cannot fetch the source distribution of {name}: {done.stderr[-2000:]}"
        )
        with tarfile.open(cache / f"{name}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    return folder


def run(suite: Path, ranks: int, subject: str, *options: str, timeout: float = 250) -> None:
    """Run the files of a subject on some ranks."""
    program = str(Path(__file__).with_name("run.py"))
    files = [f"test_{name}" for name in FILES[subject]]
    done = mpiexec(
        ranks, program, str(suite), *files, *options, "--seconds", f"{timeout - 10}", timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith(f"on {ranks} ranks: True")


# With one rank every kind of buffer: they differ in how they are read, which more ranks do alike.
@pytest.mark.parametrize("subject", FILES)
def test_all_passes_on_one_rank(suite, subject):
    run(suite, 1, subject)


@pytest.mark.parametrize("subject", [name for name in FILES if name not in ("specifications", "memory")])
def test_all_passes_on_three_ranks(suite, subject):
    run(suite, 3, subject, "--backends", "numpy")


# Ranks that wait for each other's windows spin, for minutes where cores are fewer; on plain mpi4py as long.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_windows_and_files_on_two_ranks(suite):
    run(suite, 2, "memory", "--backends", "numpy", timeout=550)
