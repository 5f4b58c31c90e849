"""Run files of mpi4py's own test suite on communicators of ours: ``mpiexec -n 3 python run.py FOLDER NAMES``.

The files see ``mpi4py.MPI`` with two names changed: ``COMM_SELF`` and ``COMM_WORLD`` are ``hc.Communicator(...,
policy="none")``. Nothing else is; so all that the tests make of them (duplicates, parts, topologies, windows, files) is
made by ours. Each test must have one of ours, or stand in ``MPI_OWN`` with the reason.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import io
import sys
import time
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpi4py
from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD

# Tests without a communicator of ours: what their names begin with.
MPI_OWN = {
    "test_cco_buf.TestReduceLocal": "reduces without a communicator",
    "test_attributes.TestDatatypeAttr": "attributes of datatypes",
    "test_attributes.TestWinAttr": "attributes of windows",
    "test_comm.TestCommNull": "of MPI.COMM_NULL",
    "test_comm_inter.TestIntercommCreateFromGroups": "of groups, by a name",
    "test_file.TestFileNull": "of MPI.FILE_NULL",
    "test_io.TestDatarep": "a representation of data",
    "test_msgspec.TestMessageDLPackCPUBuf.test": "most of them read a capsule by MPI.buffer",
    "test_msgspec.TestMessageRMA": "a window's messages",
    **{
        f"test_msgspec.TestMessageSimple{kind}.testBuffer": "of MPI.buffer"
        for kind in (
            "Array",
            "NumPy",
            "CAIBuf",
            *(f"DLPack{of}Buf{v}" for of in ("CPU", "GPU") for v in ("", "V0")),
        )
    },
    "test_p2p_buf_matched.TestMessage.testMessageN": "of no message, and of no peer's",
    "test_p2p_obj_matched.TestMessage.testMessageN": "of no message, and of no peer's",
    "test_pack.TestPackExternal": "a representation of data",
    "test_subclass.TestMyCartcommNULL": "of MPI.COMM_NULL",
    "test_subclass.TestMyCommNULL": "of MPI.COMM_NULL",
    "test_subclass.TestMyGraphcommNULL": "of MPI.COMM_NULL",
    "test_subclass.TestMyGrequest": "requests of the program's own",
    "test_subclass.TestMyInfo": "of MPI.Info",
    "test_subclass.TestMyIntracommNULL": "of MPI.COMM_NULL",
    "test_subclass.TestMyPrequest.": "of MPI.REQUEST_NULL",
    "test_subclass.TestMyRequest.": "of MPI.REQUEST_NULL",
    "test_subclass.TestMyWin": "a window without a communicator",
    "test_ulfm.TestULFMInter": "of intercommunicators that the file makes of groups",
    "test_win.TestWinNull": "of MPI.WIN_NULL",
}

# Tests that ask for what a communicator of ours cannot be.
PREDEFINED = {
    "test_comm.TestCommSelf.testPickle": "pickles by name, which only MPI's own two have",
    "test_comm.TestCommWorld.testPickle": "pickles by name, which only MPI's own two have",
}


class Seen(types.ModuleType):
    """``mpi4py.MPI`` as the files see it; counts how often they ask for a communicator.

    Attributes:
        asked: how often ``COMM_SELF`` or ``COMM_WORLD`` was asked for.
    """

    def __init__(self) -> None:
        super().__init__(MPI.__name__, MPI.__doc__)
        self.__dict__.update({k: v for k, v in vars(MPI).items() if k not in ("COMM_SELF", "COMM_WORLD")})
        self.asked = 0
        self._ours = {"COMM_SELF": ours(MPI.COMM_SELF), "COMM_WORLD": ours(WORLD)}

    def __getattr__(self, name: str) -> Any:
        if name in ("COMM_SELF", "COMM_WORLD"):
            self.asked += 1
            return self._ours[name]
        raise AttributeError(name)


def ours(comm: MPI.Intracomm) -> hc.Communicator:
    """Return a communicator that compresses nothing."""
    return hc.Communicator(comm, policy="none", timeout=60.0)


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield the tests of a suite, in an order that is the same on all ranks."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def check_handle(_: unittest.TestCase, comm: MPI.Comm) -> None:
    """Do as ``checkHandle`` of test_comm_topo, which wants the very class: a handle knows the topology, no policy."""
    for made in (MPI.Comm.fromint(comm.toint()), MPI.Comm.f2py(comm.py2f())):
        assert made == comm
        assert isinstance(comm, type(made))
        assert type(made) is not MPI.Comm


class Result(unittest.TextTestResult):
    """Notes which tests had no communicator of ours, and how long each file took.

    Attributes:
        without: names of tests that neither hold one nor asked for one.
        seconds: by file.
    """

    seen: Seen

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.without: list[str] = []
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        """Begin to count."""
        self._asked, self._start = self.seen.asked, time.perf_counter()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        """Look what the test had."""
        file = type(test).__module__
        self.seconds[file] = self.seconds.get(file, 0.0) + time.perf_counter() - self._start
        held = any(
            isinstance(value, hc.Communicator)
            for holder in (test, *type(test).__mro__)
            for value in vars(holder).values()
        )
        if not held and self.seen.asked == self._asked and test not in [t for t, _ in self.skipped]:
            self.without.append(test.id())
        super().stopTest(test)


def main() -> int:
    """Run the files, print rank 0's summary and any rank's failures; 0 if all went well on all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--backends", help="kinds of arrays, with commas between; all by default")
    parser.add_argument("--only", help="what the names of the tests have in them")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="when to end, and say where each rank is"
    )
    parser.add_argument("--times", action="store_true", help="print how long each file takes")
    args = parser.parse_intermixed_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    sys.path.insert(0, str(args.folder))
    seen = Result.seen = Seen()
    mpi4py.MPI = sys.modules["mpi4py.MPI"] = seen  # type: ignore[attr-defined]
    if args.backends is not None:
        arrays = importlib.import_module("arrayimpl")
        arrays.ArrayBackends[:] = [b for b in arrays.ArrayBackends if b.backend in args.backends.split(",")]
    loader = unittest.TestLoader()
    loaded = [loader.loadTestsFromModule(importlib.import_module(name)) for name in args.names]
    if "test_comm_topo" in sys.modules:
        sys.modules["test_comm_topo"].BaseTestTopo.checkHandle = check_handle
    tests = [test for suite in loaded for test in cases(suite) if (args.only or "") in test.id()]
    tests = [test for test in tests if test.id() not in PREDEFINED]
    text = io.StringIO()
    runner = unittest.TextTestRunner(stream=text, verbosity=0, resultclass=Result)
    result = runner.run(unittest.TestSuite(tests))
    without = [name for name in result.without if not name.startswith(tuple(MPI_OWN))]
    good = result.wasSuccessful() and not without and bool(tests)
    if not good:
        lacks = "".join(f"without a communicator of ours: {name}\n" for name in without)
        print(f"--- rank {WORLD.rank}\n{text.getvalue()}{lacks}", file=sys.stderr, flush=True)
    everywhere = WORLD.allreduce(good, op=MPI.LAND)
    if WORLD.rank == 0:
        if args.times:
            print(*(f"{seconds:7.2f} s {file}" for file, seconds in result.seconds.items()), sep="\n")
        counts = f"{result.testsRun} tests, {len(result.skipped)} of them skipped,"
        print(f"{counts} on {WORLD.size} ranks: {everywhere}")
    return 0 if everywhere else 1


if __name__ == "__main__":
    sys.exit(main())
