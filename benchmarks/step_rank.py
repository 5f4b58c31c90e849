"""Train as one rank, and sample some of the steps; ``step_profile.py`` starts this instead of ``hybridcomp``.

python benchmarks/step_rank.py SAMPLING train ...    # SAMPLING: the fields of stepprofile.records.Sampling as JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from stepprofile.parts import part_of_code
from stepprofile.records import RankRecord, Sampling
from stepprofile.sampler import Sampler

import hybridcomp.torch as hct
from hybridcomp.cli.main import main as hybridcomp


class Watch:
    """A watch over a rank's steps, which the trainer counts by ``hct.advance_step``.

    Args:
        sampling: steps to sample.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._advance = hct.advance_step
        self._sampler = Sampler(part_of_code)
        self._step = 0
        self._began = self._plain = self._core = self._others = 0.0

    def advance(self) -> None:
        """Advance the step as the trainer's call does, and begin or end sampling where it is due."""
        self._advance()
        self._step += 1
        sampling = self._sampling
        if self._step == sampling.settling:
            self._began, self._core = time.monotonic(), time.process_time()
        elif self._step == sampling.settling + sampling.plain:
            self._plain, self._core = time.monotonic() - self._began, time.process_time() - self._core
            self._control("enable")
            self._began = time.monotonic()
            self._others = time.process_time() - time.thread_time()
            self._sampler.start(sampling.hertz)
        elif self._step == sampling.steps:
            self._sampler.stop()
            ended = time.monotonic()
            others = time.process_time() - time.thread_time() - self._others
            self._control("disable")
            self._write(ended, others)

    def _control(self, word: str) -> None:
        """Send perf a command from rank 0: ``enable`` or ``disable``."""
        if _rank() == 0:
            pipe = os.open(self._sampling.control, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, f"{word}\n".encode())
            os.close(pipe)

    def _write(self, ended: float, others: float) -> None:
        sampler = self._sampler
        record = RankRecord(
            rank=_rank(),
            pid=os.getpid(),
            plain_seconds=self._plain,
            plain_core=self._core,
            began=self._began,
            ended=ended,
            samples=sampler.count,
            other_threads=others,
            parts={
                part: {"wall": times.wall, "core": times.core, "ready": times.ready}
                for part, times in sampler.parts.items()
            },
            places=[[part, place, seconds] for (part, place), seconds in sampler.places.items()],
        )
        path = Path(self._sampling.folder) / f"rank-{record.rank}.json"
        path.write_text(json.dumps(asdict(record)), encoding="utf-8")


def _rank() -> int:
    """Return this process's rank, once the trainer has initialised MPI."""
    from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

    return int(MPI.COMM_WORLD.rank)


def main() -> int:
    """Run the trainer under watch; returns its exit code."""
    watch = Watch(Sampling(**json.loads(sys.argv[1])))
    hct.advance_step = watch.advance
    return hybridcomp(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
