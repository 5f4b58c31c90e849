"""Settings of a profiled rank's sampling, and the record that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """Settings for the steps that a rank samples, which are the last ones.

    Attributes:
        folder: folder to write ``rank-N.json`` to.
        control: path of the pipe on which perf is told to begin and to end.
        settling: steps that are not timed.
        plain: steps after them that are timed without a sampler.
        sampled: steps after those.
        hertz: number of samples a second.
    """

    folder: str
    control: str
    settling: int
    plain: int
    sampled: int
    hertz: float

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.settling + self.plain + self.sampled


@dataclass(frozen=True)
class RankRecord:
    """The record of a rank.

    Attributes:
        rank: its number.
        pid: id of its process.
        plain_seconds: seconds of the steps without a sampler.
        plain_core: processor seconds of this process in those steps.
        began, ended: begin and end of sampling, in seconds of the monotonic clock, which all processes share.
        samples: number of samples.
        other_threads: processor seconds of the process's other threads while it sampled.
        parts: seconds of the main thread, ``wall``, ``core`` and ``ready``, by part.
        places: part, function and seconds by the clock of each function that samples fell in.
    """

    rank: int
    pid: int
    plain_seconds: float
    plain_core: float
    began: float
    ended: float
    samples: int
    other_threads: float
    parts: dict[str, dict[str, float]]
    places: list[list[Any]]

    @property
    def seconds(self) -> float:
        """Seconds that it sampled."""
        return self.ended - self.began
