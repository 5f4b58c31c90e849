"""mpi4py's own tests of buffer operations, from its source distribution, on communicators of ours."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import mpi4py
import pytest

from tests.torch.harness import mpiexec

ROOT = Path(__file__).parents[2]
FILES = ["test_cco_buf", "test_cco_nb_buf", "test_p2p_buf"]
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


# With one rank every kind of buffer: they differ in how they are read, which more ranks do alike.
@pytest.mark.parametrize(("ranks", "backends"), [(1, []), (3, ["--backends", "numpy"])])
def test_mpi4py_passes(suite, ranks, backends):
    run = str(Path(__file__).with_name("run.py"))
    done = mpiexec(ranks, run, str(suite), *FILES, *backends, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == f"192 tests on {ranks} ranks, 0 skipped: True"
