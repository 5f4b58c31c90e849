"""One case of :mod:`.big` on two ranks: ``python -m tests.faults.age.big_ranks OPERATION CODEC DTYPE ELEMENTS``.

Each rank prints a line: ``right``, ``WRONG``, or ``raised`` and the error; with its seconds, and its memory at most.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hybridcomp as hc

WORLD = MPI.COMM_WORLD
SECONDS = 400.0
_PIECE = 1 << 24  # elements that are filled and looked at at a time
_SPARSE = ("topk", "threshold", "sidco", "randomblock")
_APART = 10_007  # elements from one that is not zero to the next
_LOSSY = 0.02
_ROW = 1 << 12  # elements of a matrix's row


def pattern(codec: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    """Return elements of both ranks from one to another: values that every family of codecs keeps."""
    at = np.arange(start, stop)
    if dtype == np.uint8:
        return (at % 113).astype(dtype)
    if codec.startswith(_SPARSE):
        return np.where(at % _APART == 0, 1.0, 0.0).astype(dtype)
    run = (
        _ROW if codec.startswith("powersgd") else 7_919
    )  # powersgd's matrix is one row again and again, but for its sign
    return np.where(at // run % 2 == 0, 1.0, -1.0).astype(dtype)


def pieces(n: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, _PIECE):
        yield start, min(start + _PIECE, n)


def check(x: np.ndarray, codec: str, times: int) -> tuple[str, int]:
    """Return what is wrong with a result that is so many times the pattern, and a checksum of its bits."""
    checksum = 0
    for start, stop in pieces(x.size):
        piece = x[start:stop]
        checksum = zlib.crc32(piece.view(np.uint8), checksum)
        want = pattern(codec, x.dtype, start, stop).astype(np.float32) * times
        wrong = np.abs(piece.astype(np.float32) - want)
        # A random block of the elements is sent, the others come as zeros.
        off = np.where(piece == 0, 0, wrong) if codec.startswith("randomblock") else wrong
        if off.max() > _LOSSY * times:
            return f"element {start + int(off.argmax())} is off by {off.max()}", checksum
    return "", checksum


def run(comm: hc.Communicator, operation: str, codec: str, x: np.ndarray) -> int:
    """Do the operation in place; return how many times the pattern the result is."""
    if operation == "all_reduce":
        # Codecs of matrices get a matrix.
        shaped = x.reshape(-1, _ROW) if codec.startswith("powersgd") else x
        comm.Allreduce(MPI.IN_PLACE, shaped, codec=codec)
        return 2
    if operation == "broadcast":
        if comm.rank:
            x[:] = 0
        comm.Bcast(x, 0, codec=codec)
    elif comm.rank == 0:
        comm.Send(x, 1, 5, codec=codec)
    else:
        x[:] = 0
        comm.Recv(x, 0, 5, codec=codec)
    return 1


def run_torch(operation: str, x: np.ndarray) -> int:
    """Do the operation by ``torch.distributed``; return how many times the pattern the result is."""
    import torch
    import torch.distributed as dist

    import hybridcomp.torch as hct

    hct.set_policy("none")
    dist.init_process_group("hybridcomp", timeout=timedelta(seconds=SECONDS))
    rank, whole = dist.get_rank(), torch.from_numpy(x)
    half = len(x) // 2
    if operation == "torch.all_reduce":
        dist.all_reduce(whole)
        return 2
    if operation == "torch.all_to_all":  # all of it to the other rank, nothing to itself
        there = [0, len(x)] if rank == 0 else [len(x), 0]
        dist.all_to_all_single(received := torch.zeros_like(whole), whole, there, there)
        whole.copy_(received)
        return 1
    mine = whole[rank * half : (rank + 1) * half].clone()
    if operation == "torch.reduce_scatter":
        dist.reduce_scatter_tensor(mine, whole[: 2 * half])
        mine //= 2
    whole[: 2 * half] = 0
    dist.all_gather_into_tensor(whole[: 2 * half], mine)
    return 1


def main(operation: str, codec: str, dtype: str, elements: str) -> None:
    """Do one case, and say how it has ended on this rank."""
    with contextlib.suppress(OSError):  # where memory runs out after all, this is what the system ends
        Path("/proc/self/oom_score_adj").write_text("1000")
    n = int(elements)
    if codec.startswith("powersgd"):
        n = n // _ROW * _ROW
    comm = hc.Communicator(WORLD, "none", "dp", timeout=SECONDS)
    x = np.empty(n, dtype)
    for start, stop in pieces(n):
        x[start:stop] = pattern(codec, x.dtype, start, stop)
    WORLD.Barrier()
    began, verdict, checksum = time.monotonic(), "right", 0
    try:
        torchs = operation.startswith("torch.")
        times = run_torch(operation, x) if torchs else run(comm, operation, codec, x)
        took = time.monotonic() - began
        wrong, checksum = check(x, codec, times)
        verdict = f"WRONG {wrong}" if wrong else "right"
    except Exception as error:
        took = time.monotonic() - began
        verdict = f"raised {type(error).__name__}: {error}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    os.write(1, f"{verdict} | {checksum:08x} {took:.1f} s, {peak:.1f} GiB\n".encode())
    if verdict.startswith("raised"):
        os._exit(0)  # what a failed operation keeps need not be waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
