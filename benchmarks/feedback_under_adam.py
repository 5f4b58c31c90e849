"""Movement of an optimizer on compressed gradients with a constant mean, with and without error feedback.

python benchmarks/feedback_under_adam.py
python benchmarks/feedback_under_adam.py --codecs int2:block=128 topk:ratio=0.01 --json results.json

A gradient of many elements is noise of unit size around a mean a tenth as large. One sender encodes it in every step,
and Adam and SGD go by the decoded gradient. ``moved`` is the way of the parameters along the mean's direction, over
their way on the exact gradient; ``length`` is the norm of the decoded gradient over the exact one's; ``owed`` is that
of the residual at the end. With feedback the sent gradients and the residual must sum to the exact gradients, which is
checked before a figure is printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from resultfile import write

import hybridcomp as hc

CODECS = ("int8:block=128", "int4:block=128", "int2:block=128", "topk:ratio=0.01")
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
MEAN = 0.1
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """Figures of one codec; see the module."""

    noise: str
    codec: str
    feedback: str
    adam: float
    sgd: float
    length: float
    owed: float


class Adam:
    """Adam on a vector, without a learning rate; ``moved`` is the sum of its steps."""

    def __init__(self, n: int) -> None:
        self.m, self.v, self.moved, self.t = np.zeros(n), np.zeros(n), np.zeros(n), 0

    def step(self, gradient: Array) -> None:
        self.t += 1
        self.m = BETA1 * self.m + (1 - BETA1) * gradient
        self.v = BETA2 * self.v + (1 - BETA2) * gradient**2
        self.moved += self.m / (1 - BETA1**self.t) / (np.sqrt(self.v / (1 - BETA2**self.t)) + EPSILON)


def measure(spec: str, form: str | None, noise: str, n: int, steps: int) -> Row:
    """Run one codec beside the exact gradient.

    Raises:
        ValueError: the sent gradients and the residual do not sum to the exact gradients.
    """
    rng = np.random.default_rng(1)
    mean = MEAN * rng.standard_normal(n)
    codec, feedback = hc.get_codec(spec), None if form is None else hc.ErrorFeedback(spec, form=form)
    adams, sums = (Adam(n), Adam(n)), (np.zeros(n), np.zeros(n))
    lengths = []
    for _ in range(steps):
        drawn = rng.standard_normal(n) if noise == "normal" else rng.laplace(scale=0.5**0.5, size=n)
        exact = (mean + drawn).astype(np.float32)
        message = codec.encode(exact) if feedback is None else feedback.encode(exact, key=("dp", "w"))
        got = hc.decode(message).astype(np.float64)
        lengths.append(np.linalg.norm(got) / np.linalg.norm(exact))
        for number, gradient in enumerate((exact.astype(np.float64), got)):
            adams[number].step(gradient)
            sums[number][:] += gradient
    owed = np.zeros(n) if feedback is None else feedback.residual(("dp", "w"), n).astype(np.float64)
    if feedback is not None and np.linalg.norm(sums[1] + owed - sums[0]) > 1e-3 * np.linalg.norm(sums[0]):
        raise ValueError(f"{spec}: what was sent and what is owed are not what was meant")
    along = [float(mean @ adam.moved) for adam in adams]
    plain = [float(mean @ total) for total in sums]
    rms = float(np.sqrt(1 + MEAN**2) * np.sqrt(n))
    return Row(
        noise,
        spec,
        form or "none",
        along[1] / along[0],
        plain[1] / plain[0],
        float(np.mean(lengths[steps // 2 :])),
        float(np.linalg.norm(owed)) / rms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--elements", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [
        measure(codec, form, noise, args.elements, args.steps)
        for noise in ("normal", "laplace")
        for codec in args.codecs
        for form in (None, "ef")
    ]
    print(
        f"{'noise':>8} {'codec':>18} {'feedback':>9} {'moved: Adam':>12} {'SGD':>6} {'length':>7} {'owed':>6}"
    )
    for row in rows:
        print(
            f"{row.noise:>8} {row.codec:>18} {row.feedback:>9} {row.adam:>12.2f} {row.sgd:>6.2f} "
            f"{row.length:>7.2f} {row.owed:>6.2f}"
        )
    if args.json is not None:
        about = {"elements": args.elements, "steps": args.steps, "betas": [BETA1, BETA2], "mean": MEAN}
        write(args.json, about | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"feedback_under_adam: {error}")
