"""Provide mpi4py's probes for messages that MPI has and that were not received."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from os import sched_yield
from time import monotonic, sleep
from typing import Any, Literal

from mpi4py import MPI

from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.failure.watchdog import inside_mpi, watched
from hybridcomp.collectives.operations.fast_path import FastPath
from hybridcomp.errors import CollectiveTimeoutError

_POLL_SECONDS = 50e-6  # between polls for a message, once it is late


class Probes(FastPath):
    """Methods Probe, Mprobe and their kin, by MPI's own: their counts are of the bytes on the wire."""

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Literal[True]:
        """Wait until a message is here; its count is the number of bytes on the wire."""
        with self._watched():
            self._poll(lambda: self._p2p.Iprobe(source, tag, status), source)
        return True

    def Iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Tell whether a message is here."""
        engine().check_process("probe")
        with self._watched(), inside_mpi():
            return self._p2p.Iprobe(source, tag, status)

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """Wait until a message is here, and match it; return MPI's own message."""
        with self._watched():
            message: MPI.Message = self._poll(lambda: self._p2p.Improbe(source, tag, status), source)
        return message

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Match a message and return it, if one is here."""
        engine().check_process("probe")
        with self._watched(), inside_mpi():
            return self._p2p.Improbe(source, tag, status)

    def _watched(self) -> AbstractContextManager[Any]:
        return watched(f"probe on axis {self.axis!r}, rank {self.rank} of {self.size}", self.timeout)

    def _poll(self, ask: Callable[[], Any], source: int) -> Any:
        engine().check_process("probe")
        began = monotonic()
        while True:
            for _ in range(20):
                with inside_mpi():
                    found = ask()
                if found:
                    return found
                sched_yield()
            if monotonic() - began > self.timeout:
                who = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"
                raise CollectiveTimeoutError(
                    f"probe on axis {self.axis!r}, rank {self.rank} of {self.size}: no message from {who} within "
                    f"{self.timeout:g} s"
                )
            engine().poll()
            sleep(_POLL_SECONDS)
