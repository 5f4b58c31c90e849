"""Start a comparison's runs: in a lab, or on this machine as it is; and end all that they started here."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from hybridcomp.compare.plan import LabShape, Plan
from hybridcomp.errors import ConfigError
from hybridcomp.files import Log
from hybridcomp.launcher import find_mpiexec
from hybridcomp.net import Lab
from hybridcomp.net.keeper import MARK
from hybridcomp.net.launch import by_slurm, no_program, resolve
from hybridcomp.net.process import KeeperProcess

_UP_SECONDS = 60.0
_END_SECONDS = 10.0  # that a launcher has to end its ranks itself


class InLab:
    """Runs of a plan in its lab, a context manager; its notes say what the lab could not do as asked."""

    def __init__(self, plan: Plan, shape: LabShape) -> None:
        self._plan, self._shape = plan, shape
        self._lab = Lab(shape.hosts, shape.rate)
        self.notes: list[str] = []

    def __enter__(self) -> InLab:
        self._lab.__enter__()
        self.notes = list(self._lab.notes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lab.__exit__(kind, value, trace)

    def start(self, environment: Mapping[str, str], output: Log) -> subprocess.Popen[Any]:
        """Start the program on every rank of the lab."""
        command = ["hybridcomp", "run", "--", *self._plan.command]
        return self._lab.popen(
            command,
            self._shape.ppn,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a run."""
        self._lab.end(process)


class Here:
    """Runs of a plan on this machine as it is, or on those that the plan's launcher reaches.

    A keeper, as of a lab, ends the processes that carry a run's mark: also those that have left the run's process
    group, and when this process is killed.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._token = secrets.token_hex(8)
        self._marks: dict[int, str] = {}
        self.notes: list[str] = []
        self._keeper: KeeperProcess | None = None

    def __enter__(self) -> Here:
        self._keeper = KeeperProcess(
            {
                "kind": "shared-memory",
                "user_namespace": False,
                "token": self._token,
                "directory": "",  # it needs none
                "parent": os.getpid(),
            }
        )
        self._keeper.answer(_UP_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.close()

    def start(self, environment: Mapping[str, str], output: Log) -> subprocess.Popen[Any]:
        """Start the program: by its own launcher, or on the plan's number of ranks, in a Slurm job on its nodes.

        Raises:
            ConfigError: there is no such program.
        """
        command = resolve(list(self._plan.command))
        given = {**os.environ, **environment}
        _check_program(command[0], self._plan.command[0], given)
        if self._plan.ranks is not None:
            run = [sys.executable, "-m", "hybridcomp", "run"]
            if "SLURM_JOB_ID" in os.environ:
                command = [*by_slurm(find_mpiexec(), self._plan.ranks), *run, "--", *command]
                _check_program(command[0], command[0], given)
            else:
                command = [*run, "-n", str(self._plan.ranks), "--", *command]
        mark = f"{self._token}.{len(self._marks) + 1}"
        given[MARK] = mark
        process: subprocess.Popen[Any] = subprocess.Popen(
            command,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            restore_signals=False,  # as for a lab: mpiexec writes to ranks that have ended
        )
        self._marks[process.pid] = mark
        return process

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a run: its launcher first, politely, then every process on this machine that is left of it."""
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        if self._keeper is not None:
            self._keeper.end_run(self._marks[process.pid])
        process.wait()


def _check_program(program: str, named: str, environment: Mapping[str, str]) -> None:
    """Raise ConfigError where there is no such program."""
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise ConfigError(no_program(named))


def place_of(plan: Plan) -> InLab | Here:
    """Return where a plan's runs go."""
    return Here(plan) if plan.lab is None else InLab(plan, plan.lab)
