"""Tests that run on every rank at once: ``mpiexec -n 3 python -m pytest tests/mpi --with-mpi``."""

from __future__ import annotations

import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.codecs import Codec, get_codec, names
from hybridcomp.collectives.agreement import earlier

WORLD = MPI.COMM_WORLD
_SECONDS = 30.0


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 report; the others print what fails alone."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if WORLD.rank and reporter is not None:
        reporter._tw._file = io.StringIO()


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of arrays on a device; leave out those that are marked for other numbers of ranks."""
    for item in items:
        if item.path.parent.name == "device":
            item.add_marker(pytest.mark.device)
    left_out = [item for item in items if not all(map(_is_met, item.iter_markers("ranks")))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_met(marker: pytest.Mark) -> bool:
    return bool(marker.kwargs.get("least", 1) <= WORLD.size <= marker.kwargs.get("most", WORLD.size))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print each failure at once: ranks that are out of step may be ended before they come to a report."""
    if report.failed:
        sys.stderr.write(f"--- rank {WORLD.rank}: {report.nodeid}\n{report.longreprtext[-4000:]}\n")
        sys.stderr.flush()


def of_any_size(policy: Any) -> Any:
    """Have a codec as policy compress the small arrays of tests, too; return other policies as they are."""
    named = isinstance(policy, Codec) or str(policy).partition(":")[0] in names()
    return f"{get_codec(policy).spec}:min_bytes=0" if named else policy


def communicator(policy: Any = "none", axis: str = "dp", timeout: float = _SECONDS) -> hc.Communicator:
    """Make one over all ranks, with a timeout of its operations; making it may take longer on a busy machine.

    A codec as policy carries messages of any size.
    """
    comm = hc.Communicator(WORLD, of_any_size(policy), axis, timeout=_SECONDS)
    comm.timeout = timeout
    return comm


def step_by_step(comm: hc.Communicator) -> hc.Communicator:
    """Have Python do the steps of a communicator's operations, as for arrays on a device, and not the engine."""
    comm.session.programs = comm.session.message_programs = None
    return comm


@pytest.fixture(autouse=True)
def strangers() -> None:
    """Ranks find out anew about each other: a test may have put them on hosts of its own."""
    earlier.forget()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Make a directory of this rank's own.

    pytest's own fixture numbers the directories of all its processes side by side and removes old ones as a session
    ends: ranks, which end at the same time, would remove them under each other's eyes.
    """
    with tempfile.TemporaryDirectory(prefix="hybridcomp-test-") as made:
        yield Path(made)


@pytest.fixture
def make() -> Iterator[Callable[..., hc.Communicator]]:
    """Make communicators over all ranks; freed after the test, on all ranks alike."""
    made: list[hc.Communicator] = []

    def factory(policy: Any = "none", axis: str = "dp", timeout: float = _SECONDS) -> hc.Communicator:
        made.append(communicator(policy, axis, timeout))
        return made[-1]

    yield factory
    for comm in made:
        comm.Free()


def verdict(ok: bool, what: str = "") -> None:
    """Assert on all ranks together, so that no rank goes on to the next test alone."""
    ranks = WORLD.allgather(bool(ok))
    assert all(ranks), f"failed on ranks {[r for r, good in enumerate(ranks) if not good]} {what}"


def identical(array: np.ndarray) -> bool:
    """Whether all ranks hold the same bits."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    first = WORLD.bcast(raw.tobytes(), root=0)
    return bool(WORLD.allreduce(first == raw.tobytes(), op=MPI.LAND))


def gaussian(n: int, rank: int = WORLD.rank, seed: int = 1, dtype: Any = np.float32) -> np.ndarray:
    """Return the values of one rank, the caller's to write to; every rank can make every other's."""
    return _gaussian(n, rank, seed, np.dtype(dtype)).copy()


def total(n: int, seed: int = 1, dtype: Any = np.float32) -> np.ndarray:
    """Return the sum of all ranks' values in float64."""
    return _total(n, seed, np.dtype(dtype)).copy()


# Making the values takes longer than sending them does, and many tests want the same.
@functools.lru_cache(16)
def _gaussian(n: int, rank: int, seed: int, dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng([seed, rank, n]).standard_normal(n).astype(dtype)


@functools.lru_cache(8)
def _total(n: int, seed: int, dtype: np.dtype) -> np.ndarray:
    every = np.zeros(n)
    for rank in range(WORLD.size):
        every += _gaussian(n, rank, seed, dtype)
    return every


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the relative L2 error."""
    norm = float(np.linalg.norm(want))
    difference = float(np.linalg.norm(got.astype(np.float64) - want))
    return difference / norm if norm else difference


# Both ways run on three ranks, and one on other numbers, on which the way does not depend.
@pytest.fixture(params={3: ["staged", "direct"]}.get(WORLD.size, [("direct", "staged")[WORLD.size % 2]]))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Go through pinned memory, or use an MPI that takes device pointers: the emulation's are the host's."""
    from hybridcomp.collectives.device.cuda_aware import awareness
    from hybridcomp.variables import CUDA_AWARE

    if os.environ.get("HYBRIDCOMP_TEST_DEVICE") == "cuda" and request.param == "direct":
        awareness.cache_clear()
        if not awareness().messages:
            pytest.skip("this MPI takes no device pointers")
    monkeypatch.setenv(CUDA_AWARE.name, "1" if request.param == "direct" else "0")
    awareness.cache_clear()
    yield request.param
    monkeypatch.undo()
    awareness.cache_clear()
