"""Read what is to be compared: the candidates, the lab, and the command."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridcomp import __version__, variables
from hybridcomp.errors import ConfigError
from hybridcomp.net import Rate
from hybridcomp.policy import load_policy
from hybridcomp.policy.auto.spec import NAME as AUTO
from hybridcomp.policy.load import PRESETS

BASELINE = "as it is"
POLICIES = "exact,int8,hybrid,auto"
HOOK = "hook:"  # before a policy: for DDP's gradients alone, on the program's own backend
LEAST_STEPS = 10
PROFILED_STEPS = 5  # after the measured ones, for the share of waiting
_LONGEST = 100  # bytes of a candidate's name in a folder's
_LAB = re.compile(r"(\d+)x(\d+)@(.+)")
_OURS = (variables.REPLACE, variables.HOOK, variables.POLICY)


@dataclass(frozen=True)
class Candidate:
    """Way to run the program.

    Attributes:
        name: name in tables; :data:`BASELINE` for the program without hybridcomp.
        variables: variables of the environment that bring it about.
        digest: digest of its policy's rules, which a file may have others of later.
    """

    name: str
    variables: dict[str, str]
    digest: str = ""

    @property
    def line(self) -> str:
        """Return the line for a job's script that has programs run so."""
        return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in self.variables.items())

    @property
    def folder(self) -> str:
        """Return the name as part of a folder's, which no file system finds too long."""
        plain = os.fsencode("".join(c if c.isalnum() or c in "=.-" else "_" for c in self.name))
        if len(plain) <= _LONGEST:
            return os.fsdecode(plain)
        return f"{plain[:_LONGEST].decode(errors='ignore')}-{hashlib.sha256(os.fsencode(self.name)).hexdigest()[:8]}"


@dataclass(frozen=True)
class LabShape:
    """Lab to run in: hosts, ranks on each, and the rate of a host's link."""

    hosts: int
    ppn: int
    rate: str

    def __str__(self) -> str:
        """Return the lab as it is asked for: ``4x2@1gbit``."""
        return f"{self.hosts}x{self.ppn}@{self.rate}"


@dataclass(frozen=True)
class Plan:
    """Comparison to make.

    Attributes:
        command: command line of the program, or of its launcher.
        candidates: what to compare; the baseline comes first.
        ranks: number of ranks to start on this machine, or on the nodes of the Slurm job that this process is in; None
            where the command starts them.
        lab: lab to run in, if any.
        steps: optimizer steps that are measured in each run.
        warmup: steps before them.
        rounds: runs of each candidate.
        limit: longest time that a step may take, in seconds; the start counts as one.
    """

    command: Sequence[str]
    candidates: Sequence[Candidate]
    ranks: int | None = None
    lab: LabShape | None = None
    steps: int = 60
    warmup: int = 10
    rounds: int = 2
    limit: float = 300.0

    def check(self) -> None:
        """Raise ConfigError where the plan cannot be carried out."""
        if not self.command:
            raise ConfigError(
                "there is no command to compare: write it after --, as in `hybridcomp compare -n 4 -- python train.py`"
            )
        if self.steps < LEAST_STEPS:
            raise ConfigError(
                f"a comparison takes at least {LEAST_STEPS} steps to tell anything, not {self.steps}"
            )
        if self.warmup < 1:
            raise ConfigError(f"--warmup must be 1 or more, not {self.warmup}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be 1 or more, not {self.rounds}")
        if not self.limit > 0:  # nor no number
            raise ConfigError(f"--limit must be above 0 seconds, not {self.limit:g}")
        if self.ranks is not None and self.lab is not None:
            raise ConfigError(
                "-n and --lab do not go together: --lab HOSTSxRANKS@RATE says how many ranks there are"
            )
        ranks = self.ranks if self.lab is None else self.lab.hosts * self.lab.ppn
        if ranks is not None and ranks < 2:
            raise ConfigError(f"one rank sends nothing: a comparison takes two or more, not {ranks}")

    @property
    def needed(self) -> int:
        """Return the number of steps that the program must make."""
        return self.warmup + self.steps + PROFILED_STEPS

    def identity(self) -> dict[str, Any]:
        """Return what must be alike for runs of an interrupted comparison to count, in JSON's types."""
        return {
            "command": list(self.command),
            "folder": os.getcwd(),
            "files": {name: _stamp(name) for name in self.command if os.path.isfile(name)},
            "ranks": self.ranks,
            "lab": None if self.lab is None else str(self.lab),
            "steps": self.steps,
            "warmup": self.warmup,
            "version": __version__,
        }


def _stamp(name: str) -> list[int]:
    about = os.stat(name)
    return [about.st_mtime_ns, about.st_size]


def candidates_of(policies: str) -> list[Candidate]:
    """Read a list of policies, with commas between; the baseline comes first.

    Raises:
        PolicyError: there is no such policy.
        ConfigError: there is none, or one is named twice.
    """
    found = [Candidate(BASELINE, {variables.POLICY.name: "none"})]
    folders: dict[str, str] = {found[0].folder: BASELINE}
    for name in _split(policies):
        policy = name.removeprefix(HOOK)
        if not policy:
            raise ConfigError(f"--policies names {name!r} without a policy, as in {HOOK}int8")
        digest = load_policy(policy).digest
        preset = (
            policy in PRESETS or policy.partition(":")[0] == AUTO
        )  # as for load_policy, whatever files there are
        # Ranks may run in another folder.
        path = os.path.abspath(policy) if not preset and os.path.isfile(policy) else policy
        how = {variables.HOOK.name: "1"} if name.startswith(HOOK) else {variables.REPLACE.name: "gloo,nccl"}
        candidate = Candidate(name, how | {variables.POLICY.name: path}, digest)
        if (other := folders.get(candidate.folder)) is not None:
            twice = (
                f"{name!r} twice"
                if other == name
                else f"{other!r} and {name!r}, whose files would be the same"
            )
            raise ConfigError(f"--policies names {twice}")
        folders[candidate.folder] = name
        found.append(candidate)
    if len(found) == 1:
        raise ConfigError(f"--policies names none; the default is {POLICIES}")
    return found


def _split(policies: str) -> list[str]:
    """Split at commas, but not at those between the parameters of a codec: ``int8:block=64,min_bytes=0,exact``."""
    found: list[str] = []
    for part in (one.strip() for one in policies.split(",")):
        if found and "=" in part and ":" not in part:
            found[-1] += "," + part
        elif part:
            found.append(part)
    return found


def lab_of(text: str) -> LabShape:
    """Read a lab: ``4x2@1gbit`` is four hosts of two ranks each, with links of that rate.

    Raises:
        ConfigError: the text is anything else.
    """
    match = _LAB.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--lab is {text!r}; write hosts x ranks on each @ the links' rate, as in 4x2@1gbit"
        )
    return LabShape(int(match[1]), int(match[2]), str(Rate.parse(match[3])))


def environment_of(candidate: Candidate) -> dict[str, str]:
    """Return the variables of a run; those that are not to be set are empty, which is the same to hybridcomp."""
    others = dict.fromkeys((variable.name for variable in _OURS), "")
    return others | {variables.SUMMARY.name: "0"} | candidate.variables
