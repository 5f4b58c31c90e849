"""Run ``hybridcomp compare``: an unmodified program as it is and under several candidates, and what to take."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from hybridcomp import style
from hybridcomp.cli.bars import RunBars
from hybridcomp.cli.terminate import end_on_signals
from hybridcomp.compare.plan import HOOK, POLICIES, Candidate, Plan, candidates_of, lab_of
from hybridcomp.compare.results import results_of
from hybridcomp.compare.runner import Done, end_comparison, run_comparison
from hybridcomp.errors import ConfigError
from hybridcomp.files import alone_in
from hybridcomp.launcher import inside_mpi, torchrun_variables

EXAMPLES = """examples:
  hybridcomp compare -n 4 -- python train.py --config mine.yaml       # four ranks on this machine
  hybridcomp compare -- torchrun --nproc-per-node 4 train.py          # or mpiexec ...
  salloc --nodes=4 hybridcomp compare -n 4 -- python train.py         # by srun; or -- srun ...
  hybridcomp compare --lab 4x2@1gbit --policies exact,int8,hybrid,auto -- python train.py

The program runs as it is, first as it would without hybridcomp, then under each candidate, in turns. PyTorch's
optimizer steps are counted; after the last one all ranks leave by sys.exit(0), whatever the program would have done
next. Ranks on several hosts need --out in a folder that all hosts see. Called again after an interruption, the
command goes on where it was."""
_FAILED = 1  # exit status where the program fails under a candidate
_FILE_WIDTH = 200


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp compare``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp compare",
        usage="hybridcomp compare [-n RANKS | --lab HOSTSxRANKS@RATE] [--policies LIST] [options] -- COMMAND ...",
        description="Say what compression would gain for a PyTorch program: runs it as it is and under several "
        "policies, and compares time, bytes between hosts, and loss of its steps.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "-n",
        "--ranks",
        type=int,
        help="ranks to start on this machine, or by srun on the nodes of a Slurm job (default: COMMAND starts them)",
    )
    result.add_argument(
        "--lab",
        metavar="HOSTSxRANKS@RATE",
        help="hosts with slow links made on this machine, such as 4x2@1gbit",
    )
    result.add_argument(
        "--policies",
        default=POLICIES,
        metavar="LIST",
        help="candidates, the most faithful first: presets, auto, TOML files, codecs; "
        f"{HOOK}POLICY compresses DDP's gradients alone, on the program's own backend (default {POLICIES})",
    )
    result.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default 60)")
    result.add_argument("--warmup", type=int, default=10, help="steps before them (default 10)")
    result.add_argument("--rounds", type=int, default=2, help="runs of each candidate, in turns (default 2)")
    result.add_argument(
        "--limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="longest time of a step, or of the start (default 300)",
    )
    result.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="folder to write to (default runs/compare)"
    )
    result.add_argument(
        "--json", action="store_true", help="print the results as JSON, and nothing else, on stdout"
    )
    result.add_argument("command", nargs=argparse.REMAINDER, help="what to run, after --")
    return result


class Show(RunBars):
    """Display of a comparison's progress: bars on a terminal, a line for each run elsewhere."""

    def __init__(self, console: Console, plan: Plan) -> None:
        super().__init__(console, len(plan.candidates) * plan.rounds)
        self._plan = plan

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if isinstance(raised[1], KeyboardInterrupt | SystemExit):
            self._console.print(
                f"interrupted: {self._ended} of {self._runs} runs are kept; the same command goes on with the next",
                soft_wrap=True,
            )

    def begin(self, candidate: Candidate, number: int) -> None:
        """Start a run's bar."""
        self._begin(f"{candidate.name}, round {number}", self._plan.needed, "starting the ranks")

    def update(self, steps: int, loss: float | None) -> None:
        """Advance the run's bar."""
        if steps:
            self._progress.update(self._one, completed=steps, said="" if loss is None else f"loss {loss:.4g}")

    def finish(self, done: Done, *, kept: bool) -> None:
        """Print what a run gave."""
        self._count()
        if done.failure is not None:
            said = f"failed: {done.failure}"
        else:
            seconds = sum(done.records[0]["seconds"])
            said = f"{1e3 * seconds / max(1, len(done.records[0]['seconds'])):,.1f} ms a step"
        spent = "an earlier call's" if kept else self._seconds()
        self._say(f"{done.candidate.name}, round {done.round}", said, spent)


def main(argv: list[str]) -> int:
    """Run ``hybridcomp compare ARGV``; return 0, or 1 if the program fails under a candidate.

    Raises:
        ConfigError: wrong arguments.
        PolicyError: there is no such policy.
        ProgramError: the program cannot be compared.
        LabError: this machine cannot bring up the lab.
    """
    arguments = parser().parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:  # known now, not after minutes of training
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    plan = Plan(
        arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command,
        candidates_of(arguments.policies),
        arguments.ranks,
        None if arguments.lab is None else lab_of(arguments.lab),
        arguments.steps,
        arguments.warmup,
        arguments.rounds,
        arguments.limit,
    )
    plan.check()
    _check_alone(plan)
    from hybridcomp.compare.page import as_json, table_of, write_report  # noqa: PLC0415  (loads matplotlib)

    end_on_signals()
    progress = style.console(sys.stderr, width=None if sys.stderr.isatty() else _FILE_WIDTH)
    with alone_in(arguments.out):
        with Show(progress, plan) as show:
            runs, notes = run_comparison(plan, arguments.out, show)
        results = results_of(plan.candidates, runs, notes)
        page = write_report(results, plan, arguments.out)
        end_comparison(arguments.out)
    if arguments.json:
        style.say(json.dumps(as_json(results, plan), indent=1, allow_nan=False))
    else:
        console = style.console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
        table_of(results, plan).show(console)
        for said in (*results.notes, *filter(None, results.advice_and_line), f"The page: {page}"):
            console.print(said, soft_wrap=True)
    return _FAILED if any(row.failure is not None for row in results.rows) else 0


def _check_alone(plan: Plan) -> None:
    """Raise ConfigError where a launcher has started several of this command, which would all write to one folder."""
    if sys.stdin.isatty():
        return  # called in a shell that srun --pty has started, whose variables are a task's
    given = torchrun_variables() if inside_mpi() else os.environ
    size = given.get("WORLD_SIZE", "")
    if "RANK" in given and size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"a launcher has started {size} of this command, and one is to start the ranks: the launcher goes after "
            f"--, as in `hybridcomp compare -- mpiexec -n {size} {shlex.join(plan.command)}`"
        )
