"""Count what a bucket of the DDP hook costs on the emulated device: launches, copies, waits, Python calls.

The bucket is what DDP makes of a transformer's block of width 768: 12 parameters, 27 MiB. Counts depend on its
parameters and batches, not on its elements, so a narrower block is averaged, with all limits as much smaller.
"""

from __future__ import annotations

import bisect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp
from hybridcomp.collectives.device import mailbox
from hybridcomp.policy.toml import parse_policy
from hybridcomp.torch.hook import plan
from tests.emulation.runtime import EmulatedRuntime, emulated
from tests.mpi.device import hook_sides
from tests.mpi.device.devices import values
from tests.mpi.device.hook_sides import Exchanges, OnDevice, Side, TwoLevels

WIDTH = 768
CODECS = (
    ("none", None),
    ("int8:block=128", None),
    ("int4:block=128", "ef"),
    ("topk:ratio=0.01", "ef"),
    ("powersgd:rank=4", "ef"),
)
WAYS: dict[str, type[Exchanges]] = {"gloo": Exchanges, "gloo, two levels": TwoLevels, "NCCL": OnDevice}
COUNTED = ("launches", "fills", "to_host", "to_device", "on_device", "waits", "python")
_PACKAGE = str(Path(hybridcomp.__file__).parent) + "/"


def block(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a transformer block's parameters."""
    layers = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in ("norm1", "norm2"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


class Counts:
    """Counts of one device's work, while :meth:`counting`.

    Attributes:
        of: number of launches, fills, copies by direction, waits (points of a stream that the host has looked for, and
            streams that it has waited for) and calls of the package's functions.
        kernels: launches by kernel.
    """

    def __init__(self, runtime: EmulatedRuntime) -> None:
        self.of: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self._runtime, self._on = runtime, False
        self._lock = threading.Lock()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the block; the threads that run operations must be started by it, or within an earlier one."""
        names = ("launch", "copy", "fill", "matmul", "synchronize", "record", "follow")
        given = {name: getattr(self._runtime, name) for name in names}
        for name in names:
            setattr(self._runtime, name, getattr(self, f"_{name}")(given[name]))
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])
            for name in names:
                delattr(self._runtime, name)

    def begin(self) -> None:
        """Count from here, from zero."""
        self.of.clear()
        self.kernels.clear()
        self._on = True

    def end(self) -> None:
        """Count no further."""
        self._on = False

    def _add(self, what: str, n: int = 1) -> None:
        if self._on:
            with self._lock:
                self.of[what] += n

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        if self._on and event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            self._add("python")

    def _launch(self, launch: Callable[..., None]) -> Callable[..., None]:
        def counted(module: str, kernel: str, *args: Any) -> None:
            self._add("launches")
            if self._on:
                self.kernels[kernel] += 1
            launch(module, kernel, *args)

        return counted

    def _matmul(self, matmul: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            self._add("launches")
            if self._on:
                self.kernels["cuBLAS"] += 1
            matmul(*args)

        return counted

    def _copy(self, copy: Callable[..., None]) -> Callable[..., None]:
        def counted(to: int, source: int, *args: Any) -> None:
            down, up = self._is_pinned(to), self._is_pinned(source)
            self._add("to_host" if down else "to_device" if up else "on_device")
            copy(to, source, *args)

        return counted

    def _fill(self, fill: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            self._add("fills")
            fill(*args)

        return counted

    def _synchronize(self, synchronize: Callable[..., None]) -> Callable[..., None]:
        def counted(stream: int) -> None:
            self._add("waits")
            synchronize(stream)

        return counted

    def _record(self, record: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stream: _Event(record(stream), self)

    def _follow(self, follow: Callable[..., None]) -> Callable[..., None]:
        return lambda stream, event: follow(stream, getattr(event, "inner", event))

    def _is_pinned(self, ptr: int) -> bool:
        ranges = self._runtime.pinned_memory
        at = bisect.bisect_right(ranges, (ptr, sys.maxsize)) - 1
        return at >= 0 and ptr < sum(ranges[at])


class _Event:
    """An event that says whether the host has looked for it."""

    def __init__(self, inner: Any, counts: Counts) -> None:
        self.inner, self._counts, self._looked = inner, counts, False

    def _look(self) -> None:
        if not self._looked:
            self._looked = True
            self._counts._add("waits")

    def done(self) -> bool:
        self._look()
        return bool(self.inner.done())

    def wait(self) -> None:
        self._look()
        self.inner.wait()


def measure(width: int, codec: str, form: str | None, way: str, comm: MPI.Comm, steps: int = 2) -> Counts:
    """Average a block's bucket in the emulated device's memory; return the counts of the last step on this rank.

    Args:
        width: width of the block, at most that of the bucket that is meant.
        codec, form: codec of the matrices, and form of feedback.
        way: how its bytes travel, of :data:`WAYS`.
        comm: communicator that nobody else uses.
        steps: number of steps; the first ones make memory, and learn lengths.
    """
    shapes, scale = block(width), (WIDTH // width) ** 2
    n = sum(int(np.prod(shape)) for shape in shapes.values())
    feedback = f', feedback = "{form}"' if form else ""
    least = 4096 * width // WIDTH
    policy = parse_policy(
        f'min_bytes = {least}\nexclude = ["*bias"]\n[dp]\nall_reduce = {{ codec = "{codec}"{feedback} }}\n',
        "counting",
    )
    counts = Counts(emulated())
    limits = (
        (plan, "_BATCH_BYTES"),
        (plan, "_LINEAR_BATCH_BYTES"),
        (mailbox, "_AT_ONCE"),
        (plan, "_SMALL"),
        (hook_sides, "SHAPES"),
        (hook_sides, "N"),
    )
    given = [getattr(module, name) for module, name in limits]
    try:
        for (module, name), value in zip(limits[:3], given[:3], strict=True):
            setattr(module, name, value // scale)
        plan._SMALL = 4 * width + 1  # vectors are small, as at full width
        hook_sides.SHAPES, hook_sides.N = shapes, n
        with counts.counting():
            side = Side(WAYS[way](comm), device=True)
            averages = [(step, values(n, "float32", seed=step)) for step in range(steps)]
            for step, storage in averages[:-1]:
                side.average(storage, "float32", policy, step)
            before = _of_nccl(side.exchanges)
            counts.begin()
            side.average(averages[-1][1], "float32", policy, averages[-1][0])
            counts.end()
            read, written = (now - then for now, then in zip(_of_nccl(side.exchanges), before, strict=True))
    finally:
        for (module, name), value in zip(limits, given, strict=True):
            setattr(module, name, value)
    # The tests' own part of the bucket: it gets its values by a copy, and is read by a wait.
    counts.of["on_device"] -= 1
    counts.of["waits"] -= 1
    # What stands for NCCL.
    counts.of["to_host"] -= read
    counts.of["to_device"] -= written
    counts.of["waits"] -= read
    return counts


def _of_nccl(exchanges: Exchanges) -> tuple[int, int]:
    return (exchanges.read, exchanges.written) if isinstance(exchanges, OnDevice) else (0, 0)
