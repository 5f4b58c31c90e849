"""Sums of sparse arrays by density: sketches with either index, packed values, sparse codecs, dense ones, in turn.

hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/sparse_sums.py --density 0.001,0.01,0.05 --size 16M
hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/sparse_sums.py --step --density 0.01 --size 48M

Each rank has Gaussian values at random places of its own, so that the union of the ranks' is as dense as it can be.
``sketch`` with a Bloom filter is given that density, as a program would that knows its sparsifier's. With ``--step`` a
time is that of a training step: forward and backward through the transformer of ddp.py, its gradient cleared below a
threshold, and the sum of an array of ``--size`` at that density. H. Li et al. (arXiv:2402.07529) claim 6.33 times for
the sum, and 3.74 for a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import harness
import numpy as np
from allreduce import OPERATION
from collbench import output
from collbench.elements import Elements
from collbench.figures import PERIOD, Values
from harness import WORLD
from resultfile import write

import hybridcomp as hc

_MOST_ERROR = 1e-3  # largest relative L2 error of sums that are exact but for rounding
_STEP_SAMPLES, _STEP_TOKENS = 8, 64


class SparseValues(Values):
    """Gaussian values of every rank at random places, zeros elsewhere.

    Args:
        density: share of a rank's elements that are not zero.
    """

    def __init__(self, density: float) -> None:
        super().__init__(Elements("float32"))
        places = np.random.default_rng(11).random(PERIOD) < density
        again = self._series.size - PERIOD  # the series goes on with its beginning
        self._series = np.where(np.concatenate([places, places[:again]]), self._series, np.float32(0))

    def codec_error(self, spec: str) -> float:
        """Return the error as for dense values, or 1 for topk.

        topk keeps as many elements of the sum as a rank has, and so loses most of the union.
        """
        return 1.0 if spec.startswith("topk") else super().codec_error(spec)


@dataclass(frozen=True)
class SparseRow:
    """Figures of a codec at one density: a collective's row, and the densities of a rank's array and of the sum."""

    density: float
    union: float
    row: output.Row

    def record(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {"density": self.density, "union": self.union, **asdict(self.row)}


def densities(text: str) -> list[float]:
    """Read ``0.001,0.01``."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 0.001,0.01") from None
    if not all(0 < density <= 0.5 for density in found):
        raise argparse.ArgumentTypeError(f"densities must be above 0 and at most 0.5, not {text}")
    return found


def codecs(density: float, union: float) -> list[str]:
    """Return the specs of the codecs that take turns at a density."""
    specs = [
        "none",
        f"topk:ratio={density:g}",
        "threshold:abs=1e-30",  # all values that are not zero
        "sketch:form=packed",
        "sketch",
        f"sketch:index=bloom,density={union:.4g},fpr={union / 25:.2g}",
    ]
    return [hc.get_codec(spec).spec for spec in specs]


def computation(density: float) -> Callable[[], None]:
    """Make a step's computation: forward, backward, and the gradient cleared where it is small."""
    import ddp  # noqa: PLC0415  (torch takes seconds)
    import torch  # noqa: PLC0415

    model = ddp.network()
    inputs = torch.randn(_STEP_SAMPLES, _STEP_TOKENS, 512)
    limit: float | None = None

    def compute() -> None:
        nonlocal limit
        model.zero_grad()
        model(inputs).square().mean().backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        if limit is None:
            limit = float(np.quantile(flat.abs().numpy(), 1 - density))
        flat[flat.abs() < limit] = 0

    return compute


def stepped(compute: Callable[[], None]) -> harness.Operation:
    """Return the operation that computes and then sums, for all sides."""
    return replace(
        OPERATION,
        name="step",
        ours=lambda comm, send, recv, **how: (compute(), OPERATION.ours(comm, send, recv, **how)),
        mpi=lambda send, recv: (compute(), OPERATION.mpi(send, recv)),
        gloo=lambda dist, send, recv: (compute(), OPERATION.gloo(dist, send, recv)),
    )


def check(row: output.Row) -> None:
    """Check a sum that should be exact but for rounding.

    Raises:
        CheckError: its error is larger.
    """
    if not row.codec.startswith("topk") and not row.relative_error <= _MOST_ERROR:
        raise harness.CheckError(f"{row.codec}: relative error {row.relative_error:.3g}")


def measure(args: argparse.Namespace) -> None:
    """Measure all densities, and write the result file."""
    harness.say(f"# sums of sparse float32, {WORLD.size} ranks{', after a computation' if args.step else ''}")
    harness.say(f"{'density':>8} {output.HEADER.replace(chr(10), chr(10) + ' ' * 9)}")
    rows: list[SparseRow] = []
    theirs: list[dict[str, Any]] = []
    for density in args.density:
        union = 1 - (1 - density) ** WORLD.size
        operation = stepped(computation(density)) if args.step else OPERATION
        args.codec = codecs(density, union)
        for size in args.size:
            found, others = harness.measure(operation, size, SparseValues(density), args)
            for row in found:
                check(row)
                rows.append(SparseRow(density, union, row))
            theirs += [{"density": density, **asdict(row)} for row in others]
            for row in [*found, *others]:
                harness.say(f"{density:>8g} {row.line()}")
    record = output.record("step of sparse sums" if args.step else "sparse sums", args, [], [])
    record |= {"step": args.step, "rows": [row.record() for row in rows], "peers": theirs}
    if WORLD.rank == 0 and args.json is not None:
        write(args.json, record)


def main() -> None:
    flags = harness.parser(__doc__)
    flags.add_argument("--density", type=densities, default="0.001,0.01,0.05", help="of each rank's array")
    flags.add_argument("--step", action="store_true", help="time a training step around the sum")
    flags.set_defaults(algorithm=None, size="16M", peer="mpi,gloo")
    args = harness.parse(flags)
    if args.dtype != "float32":
        flags.error("--dtype: sparse sums are measured in float32")
    harness.run(lambda: measure(args))


if __name__ == "__main__":
    main()
