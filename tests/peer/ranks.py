"""Run some of PyTorch's tests on every rank: ``mpiexec -n N python -m tests.peer.ranks BACKEND FOLDER TEST ...``.

Each test has a process group of its own. Every rank tells the launcher how each went, a line of JSON each, in
``FOLDER/rank-R.jsonl``: the test, then ``pass``, ``skip`` or ``fail``, then why. It ends after one that failed.
"""

import json
import os
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_utils import set_rng_seed

import hybridcomp.torch  # noqa: F401  (ranks of any backend meet by its rendezvous)
from tests.peer import suite

_SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


def main(backend: str, folder: Path, tests: list[str]) -> None:
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    torch.set_num_threads(1)
    module = suite.load(backend, ranks)
    with open(folder / f"rank-{rank}.jsonl", "w", encoding="utf-8") as log:
        for test in tests:
            outcome, why = _run(module, test, rank, folder / test)
            log.write(json.dumps([test, outcome, why]) + "\n")
            log.flush()
            if outcome == "fail":
                os._exit(3)  # the other ranks may be anywhere: the launcher starts new ones


def _run(module: Any, test: str, rank: int, folder: Path) -> tuple[str, str]:
    case = suite.case(module, test, rank, folder)
    why = suite.skipped_at_import(case, test)
    if why:
        return "skip", why
    before = dict(os.environ)
    seconds = module.CUSTOM_PG_TIMEOUT.get(test, module.default_pg_timeout)
    outcome = "pass", ""
    try:
        dist.init_process_group(str(module.BACKEND), timeout=timedelta(seconds=seconds))
        case._barrier()
        set_rng_seed()
        try:
            getattr(case, test)()
        except unittest.SkipTest as skip:
            outcome = "skip", str(skip)
        except SystemExit as end:
            if end.code in _SKIPS:
                outcome = "skip", _SKIPS[end.code]
            elif end.code:
                return "fail", f"exits with {end.code}"
        case._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        return "fail", traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist.set_debug_level_from_env()
    return outcome


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
