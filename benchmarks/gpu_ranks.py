"""Several ranks that share one GPU: an all-reduce of device arrays, and a short training run.

mpiexec -n 4 python benchmarks/gpu_ranks.py --json runs/bench/gpu_ranks.json

Every rank must end with the same bits, the sum must be near the exact one, and the training must end with the same
parameters everywhere and a loss near that of the uncompressed run; the exit code is 1 otherwise. Ranks take turns on
the GPU, so the times say what staging costs rather than what a cluster would do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp import cuda
from hybridcomp.collectives.device.cuda_aware import awareness

WORLD = MPI.COMM_WORLD
CODECS = ("none", "bf16", "int8", "int4", "fp8:e4m3", "topk:ratio=0.01")
LARGEST_ERROR = {
    "none": 1e-6,
    "bf16": 4e-3,
    "int8": 2e-2,
    "int4": 0.3,
    "fp8:e4m3": 6e-2,
    "topk:ratio=0.01": 1.1,
}
RUNS = ("none", "int8", "int8, by the hook")
WIDTH, BATCH, STEPS = 256, 64, 60
FAR = 0.02  # largest excess of a final loss over the uncompressed run's

Row = dict[str, Any]


class Arrays:
    """Device arrays of CuPy, or of the emulation."""

    def __init__(self, device: str) -> None:
        if device == "cuda":
            import cupy  # noqa: PLC0415  (only on a GPU)

            cuda.runtime_of(0)
            self.made, self.host = cupy.asarray, cupy.asnumpy
        else:
            sys.path.insert(0, str(Path(__file__).parent.parent))
            from tests.emulation.runtime import emulated  # noqa: PLC0415  (tests only)

            self.made, self.host = emulated().array, lambda x: x.get()


def allreduces(arrays: Arrays, n: int, iterations: int) -> list[Row]:
    """Time and check an all-reduce by each codec."""
    comm = hc.Communicator(WORLD, "none", "dp")
    values = np.random.default_rng(WORLD.rank).standard_normal(n).astype(np.float32)
    exact = np.empty(n, np.float64)
    WORLD.Allreduce(values.astype(np.float64), exact)
    rows = []
    for spec in CODECS:
        send, recv = arrays.made(values), arrays.made(np.zeros_like(values))
        times = []
        for _ in range(iterations + 1):
            WORLD.Barrier()
            began = time.perf_counter()
            comm.Allreduce(send, recv, codec=spec)
            got = arrays.host(recv)  # waits for the device
            times.append(WORLD.allreduce(time.perf_counter() - began, op=MPI.MAX))
        error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
        row = {
            "codec": spec,
            "bytes": values.nbytes,
            "seconds": statistics.median(times[1:]),
            "relative_error": WORLD.allreduce(error, op=MPI.MAX),
            "identical": same_everywhere(got),
        }
        row["ok"] = row["identical"] and row["relative_error"] < LARGEST_ERROR[spec]
        rows.append(row)
        say(
            f"{spec:18} {row['seconds'] * 1e3:>10.1f} ms  relative error {row['relative_error']:.2e}  "
            f"{'same bits' if row['identical'] else 'DIFFERENT BITS'}{'' if row['ok'] else '  FAILED'}"
        )
    comm.Free()
    return rows


def same_everywhere(values: np.ndarray[Any, Any]) -> bool:
    """Tell whether all ranks hold the same bits."""
    first = WORLD.bcast(values if WORLD.rank == 0 else None, root=0)
    return bool(WORLD.allreduce(first.tobytes() == values.tobytes(), op=MPI.LAND))


def training(device: str) -> list[Row]:
    """Train a small network by DDP: through the process group, with and without compression, and with the hook."""
    import torch  # noqa: PLC0415  (the arrays come first: they need no torch)
    import torch.distributed as dist  # noqa: PLC0415

    import hybridcomp.torch as hct  # noqa: PLC0415

    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    rows: list[Row] = []
    for run in RUNS:
        policy, _, hook = run.partition(",")
        options = hct.Options(policy="none" if hook else policy, axis="dp")
        dist.init_process_group("hybridcomp", pg_options=options)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        ).to(place)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        if hook:
            ddp.register_comm_hook(hct.HookState(policy=policy), hct.comm_hook)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
        draw = torch.Generator().manual_seed(1 + WORLD.rank)
        target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)).to(place) / WIDTH**0.5
        began = time.perf_counter()
        for _ in range(STEPS):
            x = torch.randn(BATCH, WIDTH, generator=draw).to(place)
            loss = torch.nn.functional.mse_loss(ddp(x), x @ target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu().numpy()
        row: Row = {
            "policy": run,
            "steps": STEPS,
            "seconds": time.perf_counter() - began,
            "loss": WORLD.allreduce(float(loss.detach())) / WORLD.size,
            "identical": same_everywhere(parameters),
        }
        row["ok"] = (
            row["identical"] and row["loss"] <= rows[0]["loss"] * (1 + FAR) if rows else row["identical"]
        )
        rows.append(row)
        say(
            f"training, {run:18} {row['seconds']:>8.2f} s  loss {row['loss']:.5f}  "
            f"{'same bits' if row['identical'] else 'DIFFERENT BITS'}{'' if row['ok'] else '  FAILED'}"
        )
        dist.destroy_process_group()
    return rows


def say(text: str) -> None:
    if WORLD.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "emulation"), default="cuda")
    parser.add_argument("--elements", type=int, default=1 << 24, help="float32 values of each rank")
    parser.add_argument("--iters", type=int, default=5, help="all-reduces of each codec that are counted")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    aware = awareness()
    say(f"# {WORLD.size} ranks share one device; MPI takes device pointers: {aware.messages} ({aware.why})")
    rows = {
        "all_reduce": allreduces(Arrays(args.device), args.elements, args.iters),
        "training": training(args.device),
    }
    if args.json is not None and WORLD.rank == 0:
        record = {"benchmark": "ranks that share a GPU", "ranks": WORLD.size, **rows}
        write(args.json, record)
    sys.exit(not all(row["ok"] for some in rows.values() for row in some))


if __name__ == "__main__":
    main()
