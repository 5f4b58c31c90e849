"""Run the ``hybridcomp`` command: find the sub-command, load it alone, and turn errors into one line."""

from __future__ import annotations

import argparse
import importlib
import sys

from hybridcomp import HybridcompError, __version__, style, variables
from hybridcomp.errors import ConfigError, missing_module, printable
from hybridcomp.launcher import rank_here

# Each command lives in the module of its name, whose main(argv) returns the exit code; those of _LAB in hybridcomp_lab.
COMMANDS = {
    "compare": "run your program as it is and compressed, and say what to take: time, bytes, loss",
    "demo": "train one model with and without compression on a slow cluster, and compare",
    "doctor": "say what is installed and works here, and how fast; measure links and codecs",
    "generate": "write text by a trained model",
    "lab": "run a command on a cluster with slow links, made on this machine",
    "plan": "find the fastest split of a training's ranks and the codec of each axis, without running it",
    "report": "say what a run sent and what was compressed, and merge the traces of its ranks",
    "run": "run a PyTorch program as it is on several ranks, its groups or its gradients compressed",
    "schedule": "print what each rank does in a collective, check it, and draw its simulated time",
    "study": "train under a grid of policies, schedules, links and seeds, and report",
    "top": "show a running job: what each axis sends, what is in flight, and which rank is slowest",
    "train": "train a GPT over data, pipeline and tensor parallelism",
}
_LAB = ("demo", "generate", "plan", "study", "train")
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<9}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hybridcomp",
        description="Compressed collectives for distributed training.",
        epilog=f"commands:\n{listing}\n\n`hybridcomp COMMAND --help` explains each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hybridcomp [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"hybridcomp {__version__}")
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", help="one of those below")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (by default this process's) and return the exit code.

    Wrong input, which is every HybridcompError, ends as one line on stderr and exit code 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    command = _parser().parse_args(argv[:1]).command
    try:
        variables.check(rank_here())
        package = "hybridcomp_lab" if command in _LAB else "hybridcomp"
        module = importlib.import_module(f"{package}.cli.{command}")
        return int(module.main(argv[1:]))
    except HybridcompError as error:
        # A name in it may hold the end of a line; other errors quote logs.
        told = printable(error) if isinstance(error, ConfigError) else error
        style.say(f"hybridcomp {command}: error: {told}", sys.stderr)
        return EXIT_WRONG_INPUT
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("hybridcomp"):
            raise
        extra = "plan" if command == "plan" else "train"
        style.say(f"hybridcomp {command}: error: {missing_module(error.name, extra)}", sys.stderr)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
