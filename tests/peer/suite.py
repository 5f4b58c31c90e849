"""PyTorch's own distributed tests, which ship in its wheel, as a class for any backend.

Their module decides by the backend's name, while it is imported, which tests to skip. Imported under a name that
equals gloo's and MPI's, it skips none that PyTorch runs for either of them on CPU tensors. Those that need a GPU, or a
package that is not installed, still skip themselves.
"""

import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"
_NAMED = 'BACKEND = os.environ["BACKEND"]\n'
_PROFILED = (
    "PROFILING_SUPPORTED_BACKENDS",
    "CUDA_PROFILING_SUPPORTED_BACKENDS",
    "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
)


class Like(str):
    """A backend's name that equals gloo's and MPI's, too."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in ("gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, ranks: int) -> types.ModuleType:
    """Import PyTorch's tests for a backend and a number of ranks."""
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["BACKEND"] = "mpi"  # no test minds a small world for MPI
    os.environ["INIT_METHOD"] = "file:///of-each-test"
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    if source.count(_NAMED) != 1:
        raise RuntimeError(f"{MODULE} does not name its backend as it used to: {_NAMED.strip()}")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # where pickle finds its classes
    module.LIKE_GLOO = Like("gloo")
    exec(compile(source.replace(_NAMED, "BACKEND = LIKE_GLOO\n"), spec.origin, "exec"), vars(module))
    module.BACKEND = Like(backend)
    for name in _PROFILED:
        getattr(module, name).append(backend)
    return module  # type: ignore[no-any-return]


def case(module: Any, name: str, rank: int, folder: Path) -> unittest.TestCase:
    """Return one test, to be run in this process by :func:`run`.

    Args:
        module: result of :func:`load`.
        name: name of the test.
        rank: rank of this process.
        folder: folder of this test alone, the same on all ranks; it may exist.
    """

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            module.Barrier.sync(*args, **{"timeout": 60, **kwargs})

    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    os.environ["INIT_METHOD"] = module.INIT_METHOD = f"file://{folder}/init_dir/shared"
    module.Barrier.barrier_id = 0
    suite = Suite(name)
    suite.rank = rank
    suite.file_name = str(folder / "init_dir" / "file")
    return suite


def names(module: Any) -> list[str]:
    """Return all tests, in the order in which PyTorch wrote them."""
    base = module.DistributedTest._DistTestBase
    return [name for name in vars(base) if name.startswith("test_")]


def skipped_at_import(suite: unittest.TestCase, name: str) -> str:
    """Return why a decorator skips a test; '' if none does."""
    test = getattr(type(suite), name)
    return str(test.__unittest_skip_why__) if getattr(test, "__unittest_skip__", False) else ""
