"""Run cases of a module on every rank: ``mpiexec -n N python worker.py hook 240 out.json case_unused ...``.

A rank that still runs after so many seconds prints where its threads are, for the test that ends it. A case is a
function ``case_*()``. Its verdict is shared after each, so that rank 0 knows what failed anywhere.
"""

# ruff: noqa: E402  (imports start MPI, which waits for the other ranks: the seconds run before)
import faulthandler
import sys

faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv[2]))

import importlib
import json
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import hybridcomp.torch as hct


def run(module_name: str, out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.torch.cases.{module_name}")
    hct.set_policy(getattr(module, "POLICY", "none"))
    dist.init_process_group("hybridcomp", timeout=timedelta(seconds=40))
    verdicts = {}
    for name in cases:
        torch.manual_seed(0)
        try:
            getattr(module, name)()
            mine = None
        except Exception:
            mine = traceback.format_exc()
        everyone = MPI.COMM_WORLD.allgather(mine)
        verdicts[name] = "".join(f"rank {r}:\n{text}" for r, text in enumerate(everyone) if text)
        if MPI.COMM_WORLD.rank == 0:  # what is known, even if a later case does not end
            Path(f"{out}.new").write_text(json.dumps(verdicts), encoding="utf-8")
            Path(f"{out}.new").replace(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    _, module_name, _, *rest = sys.argv
    run(module_name, *rest)
