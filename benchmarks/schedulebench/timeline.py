"""Timeline of passes and links, merged from all ranks' notes: ranks share one machine's clock."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from collbench.link import Link
from mpi4py import MPI

Times = npt.NDArray[np.float64]


def gather(comm: MPI.Comm, rows: list[tuple[float, ...]], width: int) -> list[Times]:
    """Return every rank's rows of ``width`` numbers; collective."""
    mine = np.array(rows, np.float64).reshape(-1, width)
    counts = comm.allgather(mine.size)
    everyone = np.empty(sum(counts))
    comm.Allgatherv(mine, [everyone, counts])
    ends = np.cumsum(counts)
    return [everyone[e - n : e].reshape(-1, width) for n, e in zip(counts, ends.tolist(), strict=True)]


class Sampler:
    """A thread that notes the bytes that this host's link has sent, some hundred times a second.

    Args:
        seconds: seconds between two looks.

    Attributes:
        rows: (seconds, bytes) of each look.
    """

    def __init__(self, seconds: float) -> None:
        self._link = Link()
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.rows: list[tuple[float, ...]] = []

    def __enter__(self) -> Sampler:
        if self._link.now() is None:
            raise SystemExit(
                "there is no link to watch: run this by `hybridcomp lab -n 4 --rate 1gbit -- ...`"
            )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._seconds):
            now = self._link.now()
            if now is not None:
                self.rows.append((time.monotonic(), float(now.sent)))


def rates(samples: Times, start: float, end: float, window: float) -> Times:
    """Return the bytes sent in each window of the time from ``start`` to ``end``."""
    edges = np.arange(start, end, window)
    return np.diff(np.interp(edges, samples[:, 0], samples[:, 1]))


def alive(spans: list[Times], start: float, end: float, grain: float, held: float) -> tuple[int, float]:
    """Return how many spans are open at once, over all ranks.

    Args:
        spans: rows of begin and end for each rank.
        start, end: begin and end of the time that counts.
        grain: seconds between two looks.
        held: a number counts as a peak if it lasts that long: passes of two ranks that should end and begin together
            do so a little apart.

    Returns:
        The peak, and the mean over time.
    """
    looks = np.arange(start, end, grain)
    counts = np.zeros(looks.size, np.int64)
    for rows in spans:
        for begin, until in rows:
            counts += (looks >= begin) & (looks < until)
    wide = max(1, round(held / grain))
    lasting: Any = np.lib.stride_tricks.sliding_window_view(counts, wide).min(axis=1)
    return int(lasting.max()), float(counts.mean())
