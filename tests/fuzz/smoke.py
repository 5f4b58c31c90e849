"""Random mutations of the golden messages: ``python -m tests.fuzz.smoke --runs 200000``.

Needs nothing but NumPy. ``make fuzz-smoke`` runs it on kernels built with AddressSanitizer and
UndefinedBehaviorSanitizer; without them it still finds wrong exceptions and writes past the outputs.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time

import numpy as np

import hybridcomp as hc
from hybridcomp import native
from tests.fuzz import kernels as fuzz_kernels
from tests.fuzz.target import LARGE, MOST, large_seeds, one_input, seeds, without_crc

_INTERESTING = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 127, 128, 255, 256, 1023, 4096, 32767, 65535, 65536)
_INTERESTING += (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1)
_HEADER = 32
_LARGE_EVERY = 200  # executions, each of which takes as long as a hundred others
_THREADS = 4


def mutate(message: bytes, rng: np.random.Generator, corpus: list[bytes]) -> bytes:
    """Make one to four changes: bits, bytes, integers, cuts, insertions, splices; often mend the payload's length."""
    data = bytearray(message)
    for _ in range(int(rng.integers(1, 5))):
        kind, at = int(rng.integers(0, 8)), int(rng.integers(0, len(data) + 1))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1 and at < len(data):
            data[at] = int(rng.integers(0, 256))
        elif kind in (2, 3):
            size = int(rng.choice([1, 2, 4, 8]))
            value = int(_INTERESTING[int(rng.integers(0, len(_INTERESTING)))]) & (256**size - 1)
            data[at : at + size] = value.to_bytes(size, "little")
        elif kind == 4:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 5:
            data[at:at] = rng.integers(0, 256, int(rng.integers(1, 40)), np.uint8).tobytes()
        elif kind == 6:
            other = corpus[int(rng.integers(0, len(corpus)))]
            data[at:] = other[at:]
        elif len(data) >= 16:  # the element count, where most lies would be
            value = max(0, struct.unpack_from("<Q", data, 8)[0] + int(rng.integers(-3, 4)))
            data[8:16] = (value % 2**64).to_bytes(8, "little")
    if len(data) >= _HEADER and rng.random() < 0.8:
        data[16:24] = (len(data) - _HEADER).to_bytes(8, "little")
    return bytes(data)


def run(runs: int, seed: int, seconds: float = float("inf")) -> tuple[int, int]:
    """Mutate and decode; return executions and how many were taken for messages."""
    rng = np.random.default_rng(seed)
    corpus, large = seeds(), large_seeds()
    kernels = native.kernels()
    names = kernels.available_isas()
    before, threads, began, taken, done = kernels.isa(), hc.get_num_threads(), time.monotonic(), 0, 0
    try:
        with without_crc():
            for done in range(1, runs + 1):
                if done % 1000 == 1:
                    kernels.set_isa(names[done // 1000 % len(names)])
                    if time.monotonic() - began > seconds:
                        break
                of = large if done % _LARGE_EVERY == 0 else corpus
                data = mutate(of[int(rng.integers(0, len(of)))], rng, of)
                hc.set_num_threads(_THREADS if of is large else 1)
                try:
                    taken += one_input(data, max(LARGE) if of is large else MOST)
                except BaseException:
                    shown = data.hex() if of is corpus else f"{len(data)} bytes"
                    print(f"failed at {done} of seed {seed}, on {shown}", file=sys.stderr, flush=True)
                    raise
    finally:
        kernels.set_isa(before)
        hc.set_num_threads(threads)
    return done, taken


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this many")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fuzz_kernels.load()
    done, taken = run(args.runs, args.seed, args.seconds)
    print(f"{done} executions, {taken} taken for messages, no failure")


if __name__ == "__main__":
    main()
