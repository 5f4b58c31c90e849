"""Time on a device: a graph of many runs over many buffers, so that neither Python nor the cache is measured."""

from __future__ import annotations

import abc
import statistics
import time
from collections.abc import Callable, Sequence

from hybridcomp.device import DeviceArray, Queue, Runtime

Step = Callable[[Queue], None]


class Clock(abc.ABC):
    """A clock for work on one device.

    Attributes:
        runtime: runtime of the device.
        queue: queue on which everything is launched.
    """

    def __init__(self, runtime: Runtime, stream: int) -> None:
        self.runtime = runtime
        self.queue = Queue(runtime, stream)

    @abc.abstractmethod
    def measure(self, steps: Sequence[Step], other: Sequence[Step], repetitions: int) -> tuple[float, float]:
        """Return the median seconds of one of ``steps`` and of one of ``other``, taken in turn.

        The steps of a sequence run in a row: the same work on different buffers, together larger than the cache.
        """

    def calls(self, step: Step, count: int) -> float:
        """Return the seconds of one call, with calls made one after another, Python's part included."""
        step(self.queue)
        self.runtime.synchronize(self.queue.stream)
        began = time.perf_counter()
        for _ in range(count):
            step(self.queue)
        self.runtime.synchronize(self.queue.stream)
        return (time.perf_counter() - began) / count


class HostClock(Clock):
    """A clock of the emulated device, only to try the benchmark: its figures mean nothing."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, 0)

    def measure(self, steps: Sequence[Step], other: Sequence[Step], repetitions: int) -> tuple[float, float]:
        def run(some: Sequence[Step]) -> float:
            began = time.perf_counter()
            for step in some:
                step(self.queue)
            self.runtime.synchronize(self.queue.stream)
            return (time.perf_counter() - began) / len(some)

        pairs = [(run(steps), run(other)) for _ in range(repetitions)]
        return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


class CudaClock(Clock):
    """A clock by CUDA's events around a graph, or around the calls themselves where they wait for the device."""

    def __init__(self, runtime: Runtime) -> None:
        import cupy  # noqa: PLC0415  (only here)

        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        super().__init__(runtime, int(self._stream.ptr))

    def measure(self, steps: Sequence[Step], other: Sequence[Step], repetitions: int) -> tuple[float, float]:
        ours, theirs = self._captured(steps), self._captured(other)
        pairs = [(self._seconds(ours), self._seconds(theirs)) for _ in range(repetitions + 2)][2:]
        return (
            statistics.median(a for a, _ in pairs) / len(steps),
            statistics.median(b for _, b in pairs) / len(other),
        )

    def _captured(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Return a function that runs all steps: as a graph if they can be captured."""

        def plainly() -> None:
            with self._stream:  # torch's and nvCOMP's kernels too
                for step in steps:
                    step(self.queue)

        plainly()  # compiles, and fills the memory pools: nothing may be allocated in a capture
        self._stream.synchronize()
        try:
            self._stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeRelaxed)
            try:
                plainly()
            finally:
                graph = self._stream.end_capture()
        except (
            Exception
        ):  # a step that waits cannot be captured: CUDA ends the capture with an error of its own
            self._stream.synchronize()
            return plainly
        return lambda: graph.launch(self._stream)

    def _seconds(self, run: Callable[[], None]) -> float:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        run()
        end.record(self._stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3


def copies(nbytes: int, at_least: int) -> int:
    """Return how many buffers of ``nbytes`` together have ``at_least`` bytes."""
    return max(1, -(-at_least // nbytes))


def copying(pairs: Sequence[tuple[DeviceArray, DeviceArray]]) -> list[Step]:
    """Return steps that copy the second array of each pair to the first."""

    def one(to: DeviceArray, source: DeviceArray) -> Step:
        return lambda queue: queue.copy(to, source)

    return [one(*pair) for pair in pairs]
