"""Kernels without a fault against NumPy: ``python -m tests.emulation.good checked`` runs them in a flavour."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulation.emulator import Emulator

Array = npt.NDArray[Any]
SEEDS = (0, 1, 2, 12345)


class Device:
    """Arrays of an emulator."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.made: dict[int, Array] = {}

    def put(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> tuple[int, Array]:
        """Make a buffer with these values; return its address and its view."""
        source = np.asarray(values, dtype)
        address = self.emulator.alloc(source.nbytes)
        view = self.emulator.view(address, source.nbytes).view(source.dtype).reshape(source.shape)
        view[...] = source
        self.made[address] = view
        return address, view


@contextmanager
def device(emulator: Emulator) -> Iterator[Device]:
    """Yield arrays that are freed at the end."""
    made = Device(emulator)
    try:
        yield made
    finally:
        for address in made.made:
            emulator.free(address)


def equal(got: Array, expected: npt.ArrayLike) -> None:
    np.testing.assert_array_equal(got, np.asarray(expected).astype(got.dtype).reshape(got.shape))


def sum_both(d: Device, rng: np.random.Generator) -> None:
    ints, reals = rng.integers(0, 1000, (7, 128)), rng.integers(-1000, 1000, (7, 128))
    (a, _), (b, _) = d.put(ints, np.uint32), d.put(reals, np.float64)
    c, out = d.put(np.zeros((7, 2)), np.uint64)
    d.emulator.launch("emulation_good", "sum_both", 7, 128, [a, b, c])
    equal(out[:, 0], ints.sum(1))
    equal(out[:, 1].copy().view(np.float64), reals.sum(1))


def scan(d: Device, rng: np.random.Generator) -> None:
    for threads in (32, 96, 1024):
        x = rng.integers(0, 2**20, (3, threads))
        (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros_like(x), np.uint32)
        d.emulator.launch("emulation_good", "scan", 3, threads, [a, b])
        equal(out, x.cumsum(1))


def shuffles(d: Device, rng: np.random.Generator) -> None:
    kinds = {"u32": np.uint32, "i64": np.int64, "float": np.float32, "double": np.float64}
    lane = np.arange(64) % 32
    for kind, dtype in kinds.items():
        x = rng.integers(0, 2**31, 64).astype(dtype)
        for argument, width in [(0, 32), (1, 32), (3, 8), (31, 32), (5, 16), (1, 1), (30, 32), (2, 4)]:
            (a, _), (b, out) = d.put(x, dtype), d.put(np.zeros((5, 64)), dtype)
            d.emulator.launch("emulation_good", f"shuffles_{kind}", 1, 64, [a, b, argument, width])
            first, warp = lane // width * width, np.arange(64) // 32 * 32
            equal(out[0], x[warp + first + (argument + np.arange(64)) % width])
            equal(out[1], np.where(lane - argument >= first, x[warp + (lane - argument) % 32], x))
            equal(out[2], np.where(lane + argument < first + width, x[warp + (lane + argument) % 32], x))
            equal(out[3], np.where((lane ^ argument) < first + width, x[warp + (lane ^ argument) % 32], x))
            equal(out[4], x[warp + 5])


def votes(d: Device, rng: np.random.Generator) -> None:
    def bits(where: Array) -> int:
        return sum(1 << int(i) for i in np.flatnonzero(where))

    for split in (0xFFFFFFFF, 0x0000FFFF, 0x80000001, 0x5A5A1234):
        for high in (1, 2, 9, 1000):
            x = rng.integers(0, high, 64)
            (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros((64, 16)), np.uint32)
            d.emulator.launch("emulation_good", "votes", 1, 64, [a, b, split])
            for t in range(64):
                warp, inside = x[t // 32 * 32 :][:32], (split >> np.arange(32)) & 1 == 1
                lanes = inside == inside[t % 32]
                mask, y, mine = bits(lanes), warp[lanes], x[t]
                same = bool((y == y[0]).all())
                expected = [bits(lanes & (warp % 2 == 1)), (y == 7).any(), (y < 9).all()]
                expected += [bits(lanes & (warp == mine)), bits(lanes & (warp % 4 == mine % 4))]
                expected += [mask if same else 0, same, y.sum(), y.min(), y.max()]
                expected += [f.reduce(y) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
                expected += [(y.min() - 5) & 0xFFFFFFFF, (y.max() - 50) & 0xFFFFFFFF]
                equal(out[t, :15], [int(e) for e in expected])


def barrier_votes(d: Device, rng: np.random.Generator) -> None:
    x = rng.integers(2, 8, (4, 96))
    x[1, 50], x[2, 3] = 1, 9
    (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros((4, 96, 3)), np.uint32)
    d.emulator.launch("emulation_good", "barrier_votes", 4, 96, [a, b])
    each = [(x == 1).any(1), (x < 8).all(1), (x % 2).sum(1)]
    equal(out, np.repeat(np.stack(each, 1)[:, None], 96, 1))


def reverse(d: Device, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, (5, 256))
    (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros_like(x), np.uint32)
    d.emulator.launch("emulation_good", "reverse", 5, 256, [a, b], shared=4 * 256)
    equal(out, x[:, ::-1])


def neighbours(d: Device, rng: np.random.Generator) -> None:
    x, t = rng.integers(0, 2**30, 64), np.arange(64)
    (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros_like(x), np.uint32)
    d.emulator.launch("emulation_good", "neighbours", 1, 64, [a, b])
    equal(out, x[t ^ 15 ^ 31] + 1)


def histogram(d: Device, rng: np.random.Generator) -> None:
    x = rng.integers(0, 37, 5000)
    (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros(37), np.uint32)
    d.emulator.launch("emulation_good", "histogram", 6, 128, [a, b, x.size, 37], shared=4 * 37)
    equal(out, np.bincount(x, minlength=37))


def last_block(d: Device, rng: np.random.Generator) -> None:
    for kernel in ("last_block_fences", "last_block_fence"):
        x = rng.integers(0, 1000, (9, 64))
        (a, _), (sums, _) = d.put(x, np.uint32), d.put(np.zeros_like(x), np.uint32)
        (counter, left), (b, out) = d.put([0], np.uint32), d.put([0], np.uint32)
        for _ in range(2):  # the counter serves again
            d.emulator.launch("emulation_good", kernel, 9, 64, [a, sums, counter, b])
            equal(out, [3 * x.sum()])
            equal(left, [0])


def last_of_pairs(d: Device, rng: np.random.Generator) -> None:
    x = rng.integers(0, 1000, (8, 64))
    (a, _), (sums, _) = d.put(x, np.uint32), d.put(np.zeros_like(x), np.uint32)
    (counters, _), (b, out) = d.put(np.zeros(5), np.uint32), d.put([0], np.uint32)
    d.emulator.launch("emulation_good", "last_of_pairs", 8, 64, [a, sums, counters, b])
    equal(out, [x.sum()])


def pieces(d: Device, rng: np.random.Generator) -> None:
    x, vectors = rng.integers(0, 256, 64), rng.integers(0, 2**32, (16, 4))
    wide = rng.integers(0, 2**32, (2, 24))
    (a, _), (v, _), (w, _) = d.put(x, np.uint8), d.put(vectors, np.uint32), d.put(wide, np.uint32)
    b, out = d.put(np.zeros(64 + 256 + 192), np.uint8)
    d.emulator.launch("emulation_good", "pieces", 1, 64, [a, v, w, b])
    table = np.tile([3, 1, 4, 1, 5, 9, 2, 6], 8)
    equal(out[:64], (x[::-1] + table) % 256)
    equal(out[64:320].view(np.uint32).reshape(16, 4), vectors[::-1])
    equal(out[320:].view(np.uint32).reshape(2, 24), wide[::-1])


def leave_early(d: Device, rng: np.random.Generator) -> None:
    x = rng.integers(0, 100, 100)
    (a, _), (b, out) = d.put(x, np.uint32), d.put(np.zeros_like(x), np.uint32)
    d.emulator.launch("emulation_good", "leave_early", 2, 64, [a, b, 100])
    equal(out, x + 1)


def atomics(d: Device, rng: np.random.Generator) -> None:
    x = rng.integers(1, 2**63, 192).astype(np.uint64)
    start = [0, 0, 2**31 - 1, -1, 0, 0, 0, 0, 0, 0, 0, 0]
    addresses, views, source = [], [], d.put(x, np.uint64)[0]
    kinds: Sequence[Any] = (np.uint32, np.int32, np.uint64)
    for kind in kinds:
        address, view = d.put(np.array(start).astype(kind), kind)
        addresses.append(address)
        views.append(view)
    (f, single), (g, double) = d.put([0], np.float32), d.put([0], np.float64)
    d.emulator.launch("emulation_arithmetic", "atomics", 3, 64, [source, *addresses, f, g])
    for kind, view in zip(kinds, views, strict=True):
        y = x.astype(kind)
        folded = [f.reduce(y) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
        equal(view[:6], [y.sum(dtype=kind), max(y.max(), 0), min(y.min(), kind(2**31 - 1)), *folded])
        assert view[6] in y
        assert view[8] in y
        assert view[7] == view[9] == 1
    equal(views[0][10:], [(-int(x.astype(np.uint32).sum())) % 2**32, 192 % 7])
    equal(views[1][10:11], -x.astype(np.int32).sum(dtype=np.int32))
    equal(single, [(x & np.uint64(15)).sum()])
    equal(double, [(x & np.uint64(15)).sum()])


def integers(d: Device, rng: np.random.Generator) -> None:
    pairs = rng.integers(0, 2**32, (64, 2)) >> rng.integers(0, 32, (64, 2))
    pairs[:3] = [(0, 0), (2**32 - 1, 2**32 - 1), (1, 0)]
    a, _ = d.put(pairs, np.uint32)
    (b, out), (c, wide) = d.put(np.zeros((64, 16)), np.uint32), d.put(np.zeros((64, 2)), np.uint64)
    d.emulator.launch("emulation_arithmetic", "integers", 1, 64, [a, b, c])

    def signed(v: int) -> int:
        return v - 2**32 if v >= 2**31 else v

    def reversed_bits(v: int, n: int) -> int:
        return int(f"{v:0{n}b}"[::-1], 2)

    for i, (x, y) in enumerate(pairs.tolist()):
        z, s = y << 32 | x, y % 32
        both = z.to_bytes(8, "little")
        # selector 0x2B60: byte 0, byte 6, the sign of byte 3, byte 2
        permuted = bytes([both[0], both[6], 255 if both[3] & 128 else 0, both[2]])
        expected = [x.bit_count(), z.bit_count(), 32 - x.bit_length(), 64 - z.bit_length()]
        expected += [(x & -x).bit_length(), (z & -z).bit_length(), reversed_bits(x, 32)]
        expected += [int.from_bytes(permuted, "little"), (z << s >> 32) & (2**32 - 1), (z >> s) & (2**32 - 1)]
        expected += [x * y >> 32, min(x, y), max(signed(x), signed(y)) % 2**32]
        expected += [(signed(x) * signed(y) >> 32) % 2**32]
        clamped = min(y % 64, 32)
        expected += [(z << clamped >> 32) & (2**32 - 1), (z >> clamped) & (2**32 - 1)]
        equal(out[i], expected)
        assert wide[i].tolist() == [reversed_bits(z, 64), z * ((z + 1) % 2**64) >> 64]


def reals(d: Device, rng: np.random.Generator) -> None:
    pairs = np.abs(rng.standard_normal((64, 2)) * 10.0 ** rng.integers(-3, 12, (64, 2))).astype(np.float32)
    pairs[:4] = [(2.5, 1.0), (3.5, np.nan), (np.inf, 2.0), (0.5, 1e-40)]
    (a, _), (b, out) = d.put(pairs, np.float32), d.put(np.zeros((64, 12)), np.uint32)
    d.emulator.launch("emulation_arithmetic", "reals", 1, 64, [a, b])
    x, y = pairs.T
    with np.errstate(all="ignore"):
        singles = [x + y, x * y, x / y, np.sqrt(x), None, np.fmin(x, y), np.fmax(x, y)]
        wide = np.sqrt(x.astype(np.float64) * 3 / (y.astype(np.float64) + 1))
    for i, expected in enumerate(singles):
        if expected is not None:
            np.testing.assert_array_equal(out[:, i].copy().view(np.float32), expected.astype(np.float32))
    limits = np.rint(x).astype(np.float64)
    equal(out[:, 4], np.minimum(limits, 2**31 - 1).astype(np.uint32))
    equal(out[:, 11], np.minimum(limits, 2**32 - 1).astype(np.uint32))
    np.testing.assert_array_equal(out[:, 7:9].copy().view(np.float64)[:, 0], wide)


CHECKS: Sequence[Callable[[Device, np.random.Generator], None]] = (
    sum_both, scan, shuffles, votes, barrier_votes, reverse, neighbours, histogram, last_block, last_of_pairs,
    pieces, leave_early, atomics, integers, reals,
)  # fmt: skip


def main(flavour: str) -> None:
    emulator = Emulator(flavour)
    for seed in SEEDS:
        emulator.seed = seed
        for check in CHECKS:
            with device(emulator) as d:
                check(d, np.random.default_rng(seed))
    print(f"{len(CHECKS) * len(SEEDS)} checks passed")


if __name__ == "__main__":
    main(sys.argv[1])
