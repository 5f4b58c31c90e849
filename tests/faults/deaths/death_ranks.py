"""Run operations on ranks, one of which gets a signal from :mod:`.deaths`.

``mpiexec -n 3 python -m tests.faults.deaths.death_ranks FOLDER``; the folder has the plan. Before the signal, the same
operations run undisturbed, which gives the right bits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.agreement import making
from hybridcomp.collectives.execution.progress import engine
from tests.faults.deaths.death_operations import POLICY, Operation, drawn, last
from tests.faults.deaths.rank_log import Log
from tests.mpi.hosts import Hosts

WORLD = MPI.COMM_WORLD
_EASY_SECONDS = 20.0  # timeout where nothing must fail for lack of time
_CALLBACK_SECONDS = 2e-3  # seconds that a callback works
_TIMES = 6  # times that communicators are made, before and after the signal


class Terminated(BaseException):
    """Exception that a handler of SIGTERM raises, as SystemExit is."""


class Shield:
    """Block in which handlers of signals raise, once; not in the code that watches it."""

    def __init__(self) -> None:
        """Leave signals as they are."""
        self._open = False

    def take(self) -> None:
        """Answer the signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._answer)

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open = False

    def _answer(self, number: int, frame: object) -> None:
        if self._open:
            self._open = False
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated


class Ranks:
    """Do what the plan says, on this rank."""

    def __init__(self, folder: Path) -> None:
        """Read the plan."""
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        self.log = Log(folder, WORLD.rank)
        self.random = random.Random(self.plan["seed"])
        self.victim = WORLD.rank == self.plan["victim"]
        self.lethal = self.plan["lethal"]
        self.spare = WORLD.Dup()  # failures on WORLD leave nothing on it
        self.shield = Shield()
        if not self.lethal:
            self.shield.take()

    def main(self) -> None:
        """Do what the plan says, and see what works afterwards."""
        making.LEAST_SECONDS = making._EXCHANGE_SECONDS = _EASY_SECONDS
        place = self.plan["place"]
        {
            "making": self.making,
            "splitting": self.splitting,
            "rendezvous": self.rendezvous,
            "operations": self.operations,
            "callbacks": self.operations,
            "exit": self.exit,
        }[place]()
        if place == "exit":
            return
        if self.victim and self.lethal:
            time.sleep(60)  # the signal is on its way
        self.afterwards()
        self.log.leave()
        if self.lethal:
            if not self.plan["kept"]:
                time.sleep(60)  # the launcher ends the job
            os._exit(0)  # MPI_Finalize waits for the dead

    # -- places --------------------------------------------------------------------------------------

    def making(self) -> None:
        """Make communicators, one after another."""

        def make() -> hc.Communicator:
            return hc.Communicator(WORLD, "int8", "dp", timeout=self.plan["timeout"])

        make().Free()
        self.limit()
        self._make_often(make)

    def splitting(self) -> None:
        """Make communicators of parts of one."""
        comm = hc.Communicator(WORLD, "int8", "dp", timeout=self.plan["timeout"])
        ways: list[Callable[[], Any]] = [
            lambda: comm.Split(WORLD.rank % 2),
            comm.Dup,
            lambda: comm.Create(comm.mpi.Get_group()),
            lambda: comm.Split_type(MPI.COMM_TYPE_SHARED),
        ]
        comm.Split(0).Free()
        self.limit()

        def part() -> Any:
            return self.random.choice(ways)()

        self._make_often(part)

    def _make_often(self, make: Callable[[], Any]) -> None:
        for lap in range(_TIMES):
            what = f"communicator {lap}"
            self.at(lap)
            try:
                with self.shield, self.errors(what):
                    made = make()
                    x = np.full(5000, 1 + WORLD.rank, np.float32)
                    made.Allreduce(MPI.IN_PLACE, x)
                    self.log.right(what, x.tobytes(), common=made.size == WORLD.size)
                    made.Free()
            except (Left, KeyboardInterrupt, Terminated) as end:
                if not isinstance(end, Left):
                    self.log.say(what, said="interrupted")
                return

    def rendezvous(self) -> None:
        """Make process groups of torch, one after another."""
        import torch
        import torch.distributed as dist

        import hybridcomp.torch  # noqa: F401

        seconds = timedelta(seconds=self.plan["timeout"])
        self.limit()
        for lap in range(_TIMES):
            what = f"group {lap}"
            self.at(lap)
            try:
                with self.shield, self.errors(what):
                    dist.init_process_group("hybridcomp", timeout=seconds)
                    t = torch.full((5000,), 1.0 + WORLD.rank)
                    dist.all_reduce(t)
                    self.log.right(what, t.numpy().tobytes())
                    dist.destroy_process_group()
            except (Left, KeyboardInterrupt, Terminated) as end:
                if not isinstance(end, Left):
                    self.log.say(what, said="interrupted")
                return

    def operations(self) -> None:
        """Run operations undisturbed, and again with the signal."""
        hosts, callbacks = self.plan["hosts"], self.plan["place"] == "callbacks"
        cases = [
            drawn(self.random, hosts, waits=True if callbacks else None)
            for _ in range(self.plan["operations"] - 1)
        ]
        cases.append(last(self.random.getrandbits(48)))
        want = []
        comm = hc.Communicator(Hosts(WORLD, hosts), POLICY, "dp", timeout=_EASY_SECONDS)
        for case in cases:
            operation = Operation(comm, case)
            request = operation.start()
            if request is not None:
                request.wait()
            want.append(operation.bits())
        comm.Free()
        comm = hc.Communicator(Hosts(WORLD, hosts), POLICY, "dp", timeout=_EASY_SECONDS)
        comm.timeout = self.plan["timeout"]
        self.spare.Barrier()
        for number, (case, bits) in enumerate(zip(cases, want, strict=True)):
            what = f"{number}: {case}"
            operation = Operation(comm, case)
            self.at(number)
            began = time.monotonic()
            try:
                interrupts = self._act(comm, operation, callbacks)
            except (hc.HybridcompError, MPI.Exception) as error:
                self.log.failed(what, error, time.monotonic() - began)
                return
            self.log.right(what, operation.bits(), common=case.common)
            if interrupts:
                self.log.say(what, said="interrupted", times=interrupts)
            if operation.bits() != bits:
                self.log.say(what, said="WRONG")

    def _act(self, comm: hc.Communicator, operation: Operation, callbacks: bool) -> int:
        """Do an operation to its end, whatever interrupts it; return how often that was."""
        started, interrupts, called = _started(comm), 0, []
        request, attached = None, False
        while True:
            try:
                if request is None:
                    with self.shield:
                        if _started(comm) == started:
                            request = operation.start()
                        else:  # the signal came as it was started, and nobody has its request
                            engine().attend(lambda: engine().idle)
                if request is not None:
                    if callbacks and not attached:
                        attached = True
                        request.add_done_callback(lambda _: (_work(), called.append(1)))
                    with self.shield:
                        request.wait()
                break
            except (KeyboardInterrupt, Terminated):
                interrupts += 1
        if attached:
            deadline = time.monotonic() + 5
            while not called and time.monotonic() < deadline:
                time.sleep(1e-3)
            if called != [1]:
                self.log.say("callback", said="WRONG", times=len(called))
        return interrupts

    def exit(self) -> None:
        """End the program, with communicators that are not freed and perhaps an operation in flight."""
        comm = hc.Communicator(WORLD, "int8", "dp", timeout=_EASY_SECONDS)
        x = np.full(200_003, 1 + WORLD.rank, np.float32)
        comm.Allreduce(MPI.IN_PLACE, x)
        self.log.right("before the exit", x.tobytes())
        comm.timeout = self.plan["timeout"]
        if self.plan["at"] % 2:
            comm.Iallreduce(MPI.IN_PLACE, x)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self.spare.Barrier()
        if self.victim:
            self.log.arm()
        self.log.leave()
        if self.victim and self.lethal:
            time.sleep(self.plan["at"] * 5e-3)

    # -- what they share -----------------------------------------------------------------------------

    def limit(self) -> None:
        """Let MPI take no longer than the timeout to make communicators, from here on."""
        making.LEAST_SECONDS = making._EXCHANGE_SECONDS = self.plan["timeout"]
        self.spare.Barrier()

    def at(self, number: int) -> None:
        """Ask for the signal, if this is the operation to be hit."""
        if self.victim and number == self.plan["at"]:
            self.log.arm()

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Write down the error of an operation; then go on with something else."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.log.failed(what, error, time.monotonic() - began)
            raise Left from error

    def afterwards(self) -> None:
        """Work together again: all ranks, or those that live."""
        making.LEAST_SECONDS = making._EXCHANGE_SECONDS = _EASY_SECONDS
        comm: MPI.Intracomm = self.spare
        seconds = _EASY_SECONDS
        if self.lethal:
            group = self.spare.Get_group().Excl([self.plan["victim"]])
            comm, seconds = self.spare.Create_group(group), 8.0
            making.LEAST_SECONDS = making._EXCHANGE_SECONDS = seconds
        began = time.monotonic()
        x = np.full(20_003, 1 + WORLD.rank, np.float32)
        try:
            again = hc.Communicator(comm, "int8", "again", timeout=seconds)
            again.Allreduce(MPI.IN_PLACE, x)
            self.log.right("afterwards", x.tobytes(), common=True)
        except hc.HybridcompError as error:
            self.log.failed("afterwards", error, time.monotonic() - began)


class Left(Exception):
    """Failure of an operation that is written down."""


def _started(comm: hc.Communicator) -> int:
    return comm.session.started + comm.session.messages


def _work() -> None:
    until = time.monotonic() + _CALLBACK_SECONDS
    while time.monotonic() < until:
        sum(range(50))


if __name__ == "__main__":
    Ranks(Path(sys.argv[1])).main()
