"""Momentum, error feedback and message in one pass on one thread, beside memcpy: what an optimizer's exchange computes.

    python benchmarks/momentum_pass.py                          # 64 MiB of float32, signs, each instruction set
    python benchmarks/momentum_pass.py --codec 'sign:block=65536;int8;int4' --json runs/bench/momentum_pass.json

Messages and residuals are compared with those of the steps one after another before a time is printed. Times are of the
thread, since others may have the cores, taken in turn with a memcpy of as many bytes; the least of each counts. The
pass reads gradient, momentum and residual and writes a residual, 16 bytes an element, where memcpy moves 8: at
memcpy's rate its ratio is 0.5. By halves: the same work as separate passes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from resultfile import write

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.arrays import flatten
from hybridcomp.codecs import Codec, get_codec

_BETA = 0.9


def least(runs: list[Callable[[], Any]], times: int) -> list[float]:
    """Return the least seconds of this thread that each of some functions took, run in turn."""
    found = [float("inf")] * len(runs)
    for _ in range(times):
        for i, run in enumerate(runs):
            began = time.thread_time()
            run()
            found[i] = min(found[i], time.thread_time() - began)
    return found


def measure(codec: Codec, n: int, times: int) -> dict[str, Any]:
    """Measure the pass of one codec with the instruction set in use.

    Raises:
        AssertionError: its bytes are not those of the separate passes.
    """
    rng = np.random.default_rng(1)
    gradient, momentum = (rng.standard_normal(n, dtype=np.float32) for _ in range(2))
    data, whole = flatten(gradient), slice(0, n)
    passes, halves = (hc.ErrorFeedback(form="ef").memory(("w",), n) for _ in range(2))
    outs = [np.zeros(codec.bound(n), np.uint8) for _ in range(2)]
    for memory in (passes, halves):
        memory.blend(momentum, _BETA)  # type: ignore[attr-defined]

    def one_pass() -> None:
        passes.encode(codec, data, outs[0])

    def by_halves() -> None:
        halves._encode_by_halves(codec, data, outs[1], whole)

    for _ in range(3):
        one_pass()
        by_halves()
        assert (outs[0] == outs[1]).all()
        assert all((a == halves.arrays()[name]).all() for name, a in passes.arrays().items())
    copy = np.empty_like(gradient)
    memcpy, fused, apart = least([lambda: np.copyto(copy, gradient), one_pass, by_halves], times)
    return {"memcpy_s": memcpy, "pass_s": fused, "halves_s": apart, "ratio": memcpy / fused}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="sign:block=65536", help="specs, separated by ';'")
    parser.add_argument("--elements", type=int, default=1 << 24, help="float32 values (default 16 Mi)")
    parser.add_argument("--times", type=int, default=25, help="turns (default 25)")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    rows = []
    print(
        f"{'codec':>20} {'kernels':>9} {'memcpy ms':>10} {'pass ms':>9} {'halves ms':>10} {'memcpy / pass':>14}"
    )
    for spec in args.codec.split(";"):
        for isa in native.kernels().available_isas():
            with native.using_isa(isa):
                row = measure(get_codec(spec), args.elements, args.times)
            rows.append({"codec": spec, "isa": isa, **row})
            times = "".join(f"{row[key] * 1e3:>10.2f}" for key in ("memcpy_s", "pass_s", "halves_s"))
            print(f"{spec:>20} {isa:>9} {times} {row['ratio']:>13.2f}", flush=True)
    if args.json is not None:
        write(args.json, {"elements": args.elements, "rows": rows})


if __name__ == "__main__":
    main()
