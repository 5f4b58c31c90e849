"""Run ``hybridcomp lab``: a command across hosts with shaped links, made on this machine."""

from __future__ import annotations

import argparse
import shutil
import sys

from hybridcomp import style, variables
from hybridcomp.cli.terminate import end_on_signals
from hybridcomp.errors import ConfigError
from hybridcomp.net import KINDS, Lab
from hybridcomp.net.launch import no_program, resolve

EXAMPLES = """examples:
  hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/allreduce.py --codec int8 --size 64M
  hybridcomp lab -n 4 --ppn 2 --rate 200mbit -- hybridcomp train --dp 2 --pp 2 --tp 2 --policy hybrid
  hybridcomp lab -n 2 --rate 1gbit,200mbit --cores all,0.5 -- hybridcomp train --pp 2 --stage-layers 6 2

The ranks of one host share memory; between hosts they talk TCP, and what leaves a host is limited to the
rate. Ranks 0 to PPN-1 run on host 1, the next on host 2. Host I is 10.9.0.I. No network outside the lab can
be reached. The ranks find HYBRIDCOMP_LAB_KIND, _RATE (the slowest link's), _HOSTS and _PPN in their
environment, and OMP_NUM_THREADS=1 unless set.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp lab``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp lab",
        usage="hybridcomp lab [-n HOSTS] [--ppn PPN] [--rate RATE] [options] -- COMMAND ...",
        description="Run an MPI command on a cluster with slow links, made on this machine for the occasion.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("-n", "--hosts", type=int, default=4, help="how many hosts (default 4)")
    result.add_argument("--ppn", type=int, default=1, help="MPI ranks on each host (default 1)")
    result.add_argument(
        "--rate",
        default="1gbit",
        help="speed of each host's link, one for all or one for each (1gbit,1gbit,200mbit): a number and bit, kbit, "
        "mbit or gbit; none leaves it unshaped (default 1gbit)",
    )
    result.add_argument(
        "--cores",
        default="all",
        help="how many of this machine's cores the ranks of a host may use together, one number for all or one for "
        "each (all,all,0.25); takes root (default all)",
    )
    result.add_argument(
        "--kind",
        choices=KINDS,
        default="auto",
        help="namespaces: one network namespace a host; loopback: one shaped loopback for all; "
        "shared-memory: this machine as it is; auto: the first that works (default)",
    )
    result.add_argument("--quiet", action="store_true", help="say nothing about the lab itself")
    result.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    return result


def main(argv: list[str]) -> int:
    """Run ``hybridcomp lab ARGV`` and return the command's exit code.

    Raises:
        ConfigError: wrong arguments.
        LabError: this machine cannot do it.
    """
    arguments = parser().parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError(
            "there is no command to run: write it after --, as in `hybridcomp lab -n 4 -- hostname -I`"
        )
    lab = Lab(arguments.hosts, arguments.rate, kind=arguments.kind, cores=arguments.cores)
    end_on_signals()
    with lab:
        # A rank cannot see the terminal that mpiexec's output ends up on; this variable tells the trainer about it.
        env = (
            {variables.TERMINAL.name: str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}
        )
        environment = lab.environment(arguments.ppn)
        if shutil.which(resolve(command)[0], path=environment["PATH"]) is None:
            raise ConfigError(no_program(command[0]))
        if not arguments.quiet:
            for line in (describe(lab, arguments.ppn), *lab.notes):
                style.say(f"hybridcomp lab: {line}", sys.stderr)
        process = lab.popen(command, arguments.ppn, env=env)
        try:
            code = process.wait()
        except BaseException:
            lab.end(process)
            raise
    return code if code >= 0 else 128 - code


def describe(lab: Lab, ppn: int) -> str:
    """Return one line that describes the running lab."""
    hosts = f"{lab.hosts} host{'s' * (lab.hosts > 1)} with {ppn} rank{'s' * (ppn > 1)} each"
    if lab.kind != "namespaces":
        return f"{hosts} ({lab.kind})"
    if len(set(lab.rates)) > 1:
        speed = f"links at {', '.join(map(str, lab.rates))}"
    else:
        speed = "links unshaped" if lab.rate.bits_per_second is None else f"links at {lab.rate}"
    if not any(lab.cores):
        return f"{hosts}, {speed}"
    limits = ", ".join("all" if cores is None else f"{cores:g}" for cores in lab.cores)
    return f"{hosts}, {speed}, cores {limits}"
