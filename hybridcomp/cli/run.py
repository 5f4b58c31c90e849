"""Run ``hybridcomp run``: a PyTorch program on several ranks, with the variables that torchrun sets."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from hybridcomp import style, variables
from hybridcomp.errors import ConfigError
from hybridcomp.launcher import (
    LAST_WORDS_SECONDS,
    check_launcher,
    check_room,
    find_mpiexec,
    hydra_socket,
    inside_mpi,
    reserve_port,
    torchrun_variables,
)
from hybridcomp.net.launch import no_program, plain, resolve

_COMMANDS_OWN = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

EXAMPLES = """examples:
  hybridcomp run -n 4 -- python train.py --backend hybridcomp
  hybridcomp run -n 4 --policy hybrid --replace gloo -- python train.py     # a program that names gloo
  hybridcomp run -n 4 --hook -- python train.py                             # DDP's gradients, on gloo itself
  hybridcomp lab -n 4 --rate 200mbit -- hybridcomp run -- python train.py   # ranks on hosts with slow links
  srun --mpi=pmi2 -n 8 hybridcomp run --replace gloo -- python train.py     # ranks that Slurm starts

Ranks find RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; MPI knows where rank 0 is, and MASTER_ADDR and
MASTER_PORT are set, too, where all ranks are on this machine. When a rank fails, the others are ended."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp run``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp run",
        usage="hybridcomp run [-n RANKS] [--policy POLICY] [--replace BACKENDS] [--hook] -- COMMAND ...",
        description="Run a PyTorch program as it is: on several ranks of this machine, or as one that mpiexec, srun "
        "or a lab started.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "-n", "--ranks", type=int, help="on this machine (default: one for each of its cores)"
    )
    result.add_argument("--policy", help="a preset, a TOML file, or a codec such as int8 (HYBRIDCOMP_POLICY)")
    result.add_argument(
        "--replace",
        metavar="BACKENDS",
        help=f"make the groups that the program wants of gloo, nccl or gloo,nccl ({variables.REPLACE})",
    )
    result.add_argument(
        "--hook",
        action="store_true",
        help=f"register the hook on every DistributedDataParallel that has none ({variables.HOOK})",
    )
    result.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    return result


def main(argv: list[str]) -> int:
    """Run the command where this process is a rank, else replace this process by the mpiexec that starts the ranks.

    Raises:
        ConfigError: wrong arguments, or the ranks of a Slurm job are to be started by srun.
        PolicyError: there is no such policy.
    """
    arguments = parser().parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError(
            "there is no command to run: write it after --, as in `hybridcomp run -- python train.py`"
        )
    _set_variables(arguments)
    resolved = resolve(command)
    if shutil.which(resolved[0]) is None:
        raise ConfigError(no_program(command[0]))
    check_launcher()
    if inside_mpi():
        _check_size(arguments.ranks)
        os.environ.update(torchrun_variables())
        # Slurm (--kill-on-bad-exit) and Open MPI watch the exit status of every rank themselves.
        if hydra_socket() >= 0:
            _run_and_watch(resolved)
        _become(resolved)
    if "SLURM_JOB_ID" in os.environ:
        ranks = f"-n {arguments.ranks} " if arguments.ranks else ""
        raise ConfigError(
            f"srun starts the ranks of a Slurm job: srun --mpi=pmi2 {ranks}hybridcomp run "
            f"{' '.join(without_ranks(argv))} (pmi2 is for MPICH; `srun --mpi=list` shows what there is)"
        )
    _start(arguments, argv)


def _set_variables(arguments: argparse.Namespace) -> None:
    """Set the variables that the options stand for, for this process and all that it starts."""
    if arguments.policy is not None and variables.POLICY.read() != arguments.policy:
        from hybridcomp.policy import load_policy  # noqa: PLC0415  (ranks have done it)

        load_policy(arguments.policy)
        os.environ[variables.POLICY.name] = arguments.policy
    if arguments.replace is not None:
        try:
            variables.REPLACE.parse(arguments.replace)
        except ConfigError as error:
            raise ConfigError(f"--replace: {error}") from None
        os.environ[variables.REPLACE.name] = arguments.replace
    if arguments.hook:
        os.environ[variables.HOOK.name] = "1"


def _check_size(ranks: int | None) -> None:
    size = torchrun_variables()["WORLD_SIZE"]
    if ranks is not None and str(ranks) != size:
        raise ConfigError(f"-n {ranks} does not go with the {size} ranks that were started: leave it out")


def _start(arguments: argparse.Namespace, argv: list[str]) -> NoReturn:
    """Replace this process by the mpiexec that runs this command again, in each rank."""
    cores = len(os.sched_getaffinity(0))
    ranks = cores if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise ConfigError(f"-n must be 1 or more, not {ranks}")
    check_room(ranks)
    launch, variables = plain(find_mpiexec(), ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if "MASTER_PORT" not in os.environ:
        reserved = reserve_port()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}
        os.set_inheritable(reserved.detach(), True)  # it stays open in mpiexec, which replaces this process
    os.environ.update(variables)
    style.say(
        f"hybridcomp run: {ranks} rank{'s' * (ranks > 1)} on this machine{_said()}",
        sys.stderr,
    )
    _become([*launch, sys.executable, "-m", "hybridcomp", "run", *without_ranks(argv)])


def _said() -> str:
    policy, replaced, hook = variables.POLICY.read(), variables.REPLACE.read(), variables.HOOK.read()
    return "".join(
        (
            f"; policy {policy}" if policy else "",
            f"; its groups in the place of {' and '.join(sorted(replaced))}" if replaced else "",
            "; the hook on every DDP module that has none" if hook else "",
        )
    )


def without_ranks(argv: list[str]) -> list[str]:
    """Return the command line without ``-n``, which only the launcher needs."""
    options = parser()
    arguments = options.parse_args(argv)
    kept = [f"--policy={arguments.policy}"] if arguments.policy is not None else []
    kept += [f"--replace={arguments.replace}"] if arguments.replace is not None else []
    kept += ["--hook"] if arguments.hook else []
    rest: list[str] = arguments.command
    return [*kept, *(rest if rest[:1] == ["--"] else ["--", *rest])]


def _become(command: list[str]) -> NoReturn:
    """Replace this process by a command."""
    sys.stdout.flush()
    os.execvpe(command[0], command, os.environ)


def _run_and_watch(command: list[str]) -> NoReturn:
    """Run this rank's command and exit with its status, 128 + number after a signal; end all ranks where it fails.

    MPICH's mpiexec ends the other ranks when one fails that has started MPI. One that has not, as in a program that
    uses gloo, may leave the others waiting for it for as long as their own timeouts last: half an hour, in PyTorch.
    """
    sys.stdout.flush()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _COMMANDS_OWN}
    heeded = [number for number, action in before.items() if action is not signal.SIG_IGN]
    pid = os.posix_spawnp(
        command[0], command, os.environ, setsigdef=[*heeded, signal.SIGPIPE, signal.SIGXFSZ]
    )  # the last two are ignored by Python
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        if -status not in _COMMANDS_OWN:  # one that was asked to end needs no explanation
            how = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
            style.say(
                f"hybridcomp run: rank {torchrun_variables()['RANK']} {how}; ending all ranks",
                sys.stderr,
            )
        status = 128 - status if status < 0 else status
        time.sleep(LAST_WORDS_SECONDS)
        with suppress(OSError):  # a rank that has left MPI in order has no connection any more
            os.write(hydra_socket(), f"cmd=abort exitcode={status}\n".encode())
    sys.exit(status)
