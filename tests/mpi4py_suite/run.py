"""Run files of mpi4py's own test suite on communicators of ours: ``mpiexec -n 3 python run.py FOLDER NAMES``.

``MPI.COMM_SELF`` and ``MPI.COMM_WORLD`` in the tests' classes, and the duplicates that their ``setUp`` makes, become
``hc.Communicator(..., policy="none")``. Nothing else is changed.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD


def ours(comm: MPI.Comm) -> hc.Communicator:
    """Return a communicator that compresses nothing."""
    return hc.Communicator(comm, policy="none", timeout=60.0)


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield the tests of a suite, in an order that is the same on all ranks."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def put_ours(tests: list[unittest.TestCase]) -> int:
    """Replace the communicators of the tests' classes; return how many tests have ours."""
    fixed = {id(MPI.COMM_SELF): ours(MPI.COMM_SELF), id(MPI.COMM_WORLD): ours(WORLD)}
    classes = {type(test): None for test in tests}
    for kind in classes:
        given = kind.__dict__.get("COMM")
        if given is not None:
            kind.COMM = fixed[id(given)]
        if "setUp" in kind.__dict__:  # makes COMM a duplicate of MPI's
            kind.setUp = duplicating(kind, fixed)
    return sum(isinstance(type(test).COMM, hc.Communicator) for test in tests)


def duplicating(kind: type, fixed: dict[int, hc.Communicator]) -> object:
    """Return the ``setUp`` of a class that tests duplicates, with a duplicate of ours."""
    source = next(c.__dict__["COMM"] for c in kind.__mro__ if "COMM" in c.__dict__)

    def set_up(self: unittest.TestCase) -> None:
        comm = source if isinstance(source, hc.Communicator) else fixed[id(source)]
        self.COMM = comm.Dup()

    return set_up


def main() -> int:
    """Run the files, print rank 0's summary and any rank's failures; 0 if all went well on all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--backends", help="kinds of arrays, with commas between; all by default")
    args = parser.parse_intermixed_args()
    sys.path.insert(0, str(args.folder))
    if args.backends is not None:
        arrays = importlib.import_module("arrayimpl")
        arrays.ArrayBackends[:] = [b for b in arrays.ArrayBackends if b.backend in args.backends.split(",")]
    loader = unittest.TestLoader()
    loaded = [loader.loadTestsFromModule(importlib.import_module(name)) for name in args.names]
    tests = [test for suite in loaded for test in cases(suite) if hasattr(type(test), "COMM")]
    with_ours = put_ours(tests)
    text = io.StringIO()
    result = unittest.TextTestRunner(stream=text, verbosity=0).run(unittest.TestSuite(tests))
    good = result.wasSuccessful() and with_ours == len(tests) > 0
    if not good:
        print(f"--- rank {WORLD.rank}\n{text.getvalue()}", file=sys.stderr, flush=True)
    everywhere = WORLD.allreduce(good, op=MPI.LAND)
    if WORLD.rank == 0:
        print(f"{result.testsRun} tests on {WORLD.size} ranks, {len(result.skipped)} skipped: {everywhere}")
    return 0 if everywhere else 1


if __name__ == "__main__":
    sys.exit(main())
