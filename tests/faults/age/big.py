"""Arrays that an int does not count: 3 GiB, and 2**31 + 1 elements, by each family of codecs, in sends, and by PyTorch.

``python -m tests.faults.age.big`` (``make big``) runs on two ranks, one case after another, and takes 20 GiB of memory.
``--scale 0.1`` makes all arrays smaller, to try the program itself; ``--only int8`` runs some of the cases. Each ends
with the right values and the same bits on both ranks, or with an error on both.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from hybridcomp.launcher import find_mpiexec

ROOT = Path(__file__).parents[3]
NEEDED_GIB = 20
_SECONDS = 900.0
_THREE_GIB = 3 << 28  # float32
_MANY = 2**31 + 1
FAMILIES = [
    *(
        "none",
        "bf16",
        "int8",
        "int4:block=64:symmetric=false",
        "sign",
        "lossless",
        "mpc",
        "fp8",
        "mxfp4",
        "bounded",
    ),
    *("topk:ratio=0.01", "threshold:abs=0.7", "sidco:ratio=0.02", "powersgd:rank=1", "zfp:rate=8"),
    *("randomblock:ratio=0.05",),
]


class Case(NamedTuple):
    """An operation on an array, by a codec."""

    operation: str
    codec: str
    dtype: str
    elements: int


CASES = [
    *(Case("all_reduce", codec, "float32", _THREE_GIB) for codec in FAMILIES),
    *(
        Case("all_reduce", codec, "float16", _MANY)
        for codec in ("none", "int8", "lossless", "topk:ratio=0.01")
    ),
    *(Case(operation, "none", "uint8", _MANY) for operation in ("all_reduce", "broadcast", "send")),
    *(
        Case(f"torch.{operation}", "none", "uint8", _MANY)
        for operation in ("all_reduce", "all_to_all", "reduce_scatter", "all_gather")
    ),
    *(Case("send", codec, "float32", _THREE_GIB) for codec in ("none", "int8", "lossless")),
    *(Case("send", codec, "float16", _MANY) for codec in ("none", "int8")),
    *(Case("broadcast", codec, "float16", _MANY) for codec in ("none", "int8")),
]


def run(case: Case, scale: float) -> tuple[bool, str]:
    """Run a case; return whether it is well, and how it has ended."""
    words = (case.operation, case.codec, case.dtype, str(round(case.elements * scale)))
    unlike = ("PMI", "HYBRIDCOMP")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unlike)}
    try:
        done = subprocess.run(
            [find_mpiexec(), "-n", "2", sys.executable, "-m", "tests.faults.age.big_ranks", *words],
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1", "HYBRIDCOMP_SUMMARY": "0"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            restore_signals=False,  # as a lab starts programs
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end within {_SECONDS:g} s"
    lines = [line for line in done.stdout.splitlines() if " | " in line]
    kinds = {line.split()[0] for line in lines}
    sums = {match[1] for line in lines if (match := re.search(r"\| ([0-9a-f]{8}) ", line))}
    alike = case.operation == "send" or len(sums) == 1
    well = (
        len(lines) == 2 and done.returncode == 0 and (kinds == {"raised"} or (kinds == {"right"} and alike))
    )
    return well, "\n    ".join(lines) if lines else f"{done.returncode}: {done.stdout}{done.stderr}"


def available_gib() -> float:
    """Return the memory in GiB that programs may have, by the system's own estimate."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20


def main() -> int:
    """Run the cases; return 1 if one is not well, 2 if there is too little memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of all arrays")
    parser.add_argument("--only", default="", help="cases that have this in them")
    parser.add_argument("--needs", type=float, default=NEEDED_GIB, help="GiB of memory at least")
    arguments = parser.parse_args()
    needed, there = arguments.needs * min(1.0, arguments.scale), available_gib()
    if there < needed:
        print(f"make big needs {needed:.1f} GiB of memory; {there:.1f} GiB are available (try --scale 0.1)")
        return 2
    failed = 0
    for case in CASES:
        name = f"{case.operation} {case.codec} {case.dtype}"
        if arguments.only not in name:
            continue
        well, text = run(case, arguments.scale)
        failed += not well
        print(
            f"{'well ' if well else 'FOUND'} {name} {round(case.elements * arguments.scale)}\n    {text}",
            flush=True,
        )
    print(f"{failed} cases are not well")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
