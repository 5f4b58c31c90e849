"""Tell which files of results are stale, and renew one.

make figures                                   # a table: what has changed since, of the code that each file measures
make figures RENEW='ddp_1gbit_4hosts.json'     # runs the command that measures a file anew; several, apart by blanks

A file is stale if code that it measures differs from that of the commit that it was measured at. Files that do not say
their commit are taken to be of the last commit that changed them, in brackets: what they measure is as old or older.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from resultfile import read

from hybridcomp.errors import printable

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks") / "results"  # of a clone

_CODECS = ("hybridcomp/codecs", "kernels/codecs", "kernels/include", "kernels/python")
_SCHEDULES = ("hybridcomp/schedules", "hybridcomp/perfmodel")
_ENGINE = (*_CODECS, *_SCHEDULES, "hybridcomp/collectives", "hybridcomp/policy", "kernels/engine")
_TORCH = (*_ENGINE, "hybridcomp/torch")
_TRAIN = (*_TORCH, "hybridcomp_lab/train")
_DEVICE = (
    *_CODECS,
    "hybridcomp/collectives/device",
    "hybridcomp/device.py",
    "hybridcomp/cuda.py",
    "kernels/cuda",
)
_COLLECTIVES = (*_ENGINE, "benchmarks/harness.py", "benchmarks/collbench")


@dataclass(frozen=True)
class Figure:
    """Files of results that one command measures.

    Attributes:
        files: pattern of their paths in the folder of results.
        measures: paths of the code that they measure; ``{folder}`` and ``{stem}`` are those of a file.
        renew: commands that measure them anew, with the same words in braces; none if that takes more than a command.
    """

    files: str
    measures: tuple[str, ...]
    renew: tuple[str, ...] = ()


def _made(target: str) -> tuple[str, ...]:
    return (f"make {target} RESULTS=benchmarks/results",)


def _run(program: str, arguments: str = "", before: str = "") -> tuple[str, ...]:
    out = "--json benchmarks/results/{file}"
    return (" ".join(filter(None, (before, f"python benchmarks/{program}.py", arguments, out))),)


_PAIR = "mpiexec -n 2"

FIGURES = (
    Figure("demo/results.json", (*_TRAIN, "hybridcomp_lab/demo"),
           ("hybridcomp demo --full --out runs/figures/demo",
            "cp runs/figures/demo/results.json runs/figures/demo/demo.png benchmarks/results/demo",
            "python benchmarks/pages/readme.py")),
    Figure("allreduce_*.json", (*_COLLECTIVES, "benchmarks/allreduce.py"), _made("bench")),
    Figure("openmpi_allreduce_*.json", (*_COLLECTIVES, "benchmarks/allreduce.py")),  # takes another MPI
    Figure("sizes/*.json", (*_COLLECTIVES, "benchmarks/allreduce.py"), _made("bench-sizes")),
    Figure("exact/*.json", (*_COLLECTIVES, "benchmarks/allreduce.py", "benchmarks/sendrecv.py"), _made("bench-exact")),
    Figure("sparse/*.json", (*_COLLECTIVES, "benchmarks/sparse_sums.py"), _made("bench-sparse")),
    Figure("lab/*.json", (*_COLLECTIVES, "benchmarks/{stem}.py"), _made("bench-lab LAB='--only {stem}_ --again'")),
    Figure("ddp_*_4hosts.json", (*_TORCH, "benchmarks/ddp.py"), _made("bench-ddp")),
    Figure("ddp_*_2x4.json", (*_TORCH, "benchmarks/ddp.py"),
           _run("ddp", "--policy int8;int4 --over-gloo --iters 2", "hybridcomp lab -n 2 --ppn 4 --rate {rate} --")),
    Figure("onebit_ddp_*.json", (*_TORCH, "benchmarks/ddp.py"),
           _run("ddp", "--policy none;sign:block=65536+ef --onebit --iters 2", "hybridcomp lab -n 4 --rate {rate} --")),
    Figure("onebit_gpt.json", (*_TORCH, "examples/onebit.py")),
    Figure("onebit/*.json", (*_TORCH, "examples/onebit.py", "benchmarks/onebit_losses.py"),
           _run("onebit_losses", "--study {stem}")),
    Figure("codecs/*.json", (*_CODECS, "benchmarks/codecs.py", "benchmarks/codecbench"), _made("bench-codecs")),
    Figure("momentum_pass.json", (*_CODECS, "benchmarks/momentum_pass.py"),
           _run("momentum_pass", "--codec sign:block=65536;int8;int4")),
    Figure("gpu/*/*.json", (*_DEVICE, "benchmarks/gpubench", "benchmarks/gpu_ranks.py"), _made("gpu")),
    Figure("device_counts/*.json", (*_DEVICE, "hybridcomp/torch", "benchmarks/device_counts.py"),
           _made("bench-device")),
    Figure("starts_2ranks.json", (*_TORCH, "benchmarks/starts.py"), _run("starts", before=_PAIR)),
    Figure("watched_2ranks.json", (*_ENGINE, "hybridcomp/top", "benchmarks/watched.py"),
           _run("watched", "--rounds 100", _PAIR)),
    Figure("mpi4py_calls.json", (*_ENGINE, "benchmarks/calls.py"), (
        *_run("calls", before=_PAIR), *_run("calls", "--lab", "hybridcomp lab -n 2 --rate 1gbit --"))),
    Figure("auto/change.json", (*_ENGINE, "benchmarks/auto_change.py"), _run("auto_change")),
    Figure("auto/training/results.json", (*_TRAIN, "studies/auto.toml"),
           ("hybridcomp study studies/auto.toml --results benchmarks/results/auto/training",)),
    Figure("auto/*.json", (*_ENGINE, "benchmarks/auto.py"),
           _run("auto", "--link {stem}", "hybridcomp lab -n 4 --rate {stem} --")),
    Figure("adapt/feedback_under_adam.json", (*_CODECS, "benchmarks/feedback_under_adam.py"),
           _run("feedback_under_adam")),
    Figure("adapt/time_to_loss.json", (*_TRAIN, "benchmarks/time_to_loss.py"), (
        "python benchmarks/time_to_loss.py --only gravac 'top-k 0.1' 'top-k 0.01' 'top-k 0.001' "
        "--rates 200mbit 100mbit 1gbit --json runs/figures/time_to_loss.json "
        "--plot benchmarks/results/adapt/time_to_loss.png",
        "cp runs/figures/time_to_loss.json benchmarks/results/{file}")),
    Figure("fsdp_loss.json", (*_TRAIN, "benchmarks/fsdp_loss.py"), _run("fsdp_loss", "--steps 200")),
    Figure("dlrm.json", (*_TORCH, "benchmarks/dlrm.py"), _run("dlrm", "--rates 200mbit 1gbit --seeds 1 2 3")),
    Figure("techniques.json", (*_TRAIN, "benchmarks/techniques.py"), _run("techniques",
           "--rate 200mbit --flags '--layers 4 --d-model 128 --heads 4 --seq-len 64 --micro-batch-size 8'")),
    Figure("techniques_20mbit.json", (*_TRAIN, "benchmarks/techniques.py"), _run("techniques",
           "--only cool-down --rate 20mbit --backward int8:block=128 "
           "--flags '--layers 4 --d-model 128 --heads 4 --seq-len 64 --micro-batch-size 8'")),
    Figure("consensus/consensus.json", (*_ENGINE, "benchmarks/consensus.py"),
           _run("consensus", "--picture benchmarks/results/consensus/consensus.png")),
    Figure("schedules/*.json", (*_TRAIN, "benchmarks/pipelines.py", "benchmarks/cyclic.py", "benchmarks/schedulebench"),
           _made("bench-schedules")),
    Figure("step_profile.json", (*_TRAIN, "benchmarks/step_profile.py", "benchmarks/stepprofile"), _made("bench-step")),
    Figure("report/*.json", (*_TRAIN, "hybridcomp/breakdown", "hybridcomp/trace.py"), _made("bench-report")),
    Figure("examples.json", (*_TORCH, "examples", "benchmarks/examples_lab.py"), _made("bench-examples")),
    Figure("chaos.json", (*_TRAIN, "tests/faults"), _made("chaos")),
    Figure("members/*.json", (*_TRAIN, "hybridcomp/torch/torchft", "benchmarks/members.py"), _made("members")),
    Figure("model/collectives.json", (*_ENGINE, "benchmarks/model.py", "benchmarks/modelbench"), (
        "python benchmarks/model.py calibrate --out benchmarks/results/model",
        "python benchmarks/model.py measure --cells runs/figures/model",
        "python benchmarks/model.py judge --cells runs/figures/model --out benchmarks/results/model")),
    Figure("planner/error.json", (*_CODECS, "hybridcomp/schedules", "benchmarks/error_at_scale.py"),
           _run("error_at_scale", "--picture benchmarks/results/planner/error.png")),
    Figure("planner/recompute.json",
           ("hybridcomp_lab/planner", "hybridcomp_lab/train", "benchmarks/recompute_memory.py"),
           _run("recompute_memory")),
    Figure("planner/plan_16x8.json", (*_SCHEDULES, "hybridcomp_lab/planner", "examples/cluster_16x8.toml")),
    Figure("planner/scale_16x8.json", (*_SCHEDULES, "hybridcomp_lab/planner", "examples/cluster_16x8.toml")),
    Figure("planner/*.json", (*_TRAIN, "hybridcomp_lab/planner", "benchmarks/step_model.py", "benchmarks/stepmodel",
                              "benchmarks/placement.py"), (
        "make bench-plan RESULTS=runs/figures", "cp -r runs/figures/planner benchmarks/results",
        "python benchmarks/pages/plan_doc.py")),
    Figure("*-speed/results.json", (*_TRAIN, "studies/{study}.toml"), (
        "hybridcomp study studies/{study}.toml --part speed --out runs/figures/{folder} "
        "--results benchmarks/results/{folder}",)),
    Figure("*/results.json", (*_TRAIN, "studies/{study}.toml"), (
        "hybridcomp study studies/{study}.toml --out runs/figures/{folder} --results benchmarks/results/{folder}",)),
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\.json")  # goes into commands
_SHOWN = 3  # paths that have changed, in the table
_COMMIT = re.compile(r"[0-9a-f]{4,40}(-dirty)?")


class FigureError(Exception):
    """A file of results that there is not, or that no command measures."""


@dataclass(frozen=True)
class Age:
    """Tell what has become of the code that a file measures.

    Attributes:
        file: path in the folder of results.
        commits: commits that it says, or the last that changed it.
        said: whether the file says them.
        date: date that it says, empty if none.
        stale: whether that code has changed; None if it cannot be told.
        since: commits since then that changed it.
        changed: paths of it that have changed, of those that are declared.
        why: what else is to be said.
    """

    file: str
    commits: tuple[str, ...]
    said: bool
    date: str
    stale: bool | None
    since: int = 0
    changed: tuple[str, ...] = ()
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        name = ", ".join(self.commits) or "?"
        changed = ", ".join(self.changed[:_SHOWN])
        more = len(self.changed) - _SHOWN
        if more > 0:
            changed += f" and {more} more"
        return (
            {True: "STALE", False: "fresh", None: "?"}[self.stale],
            printable(self.file),
            name if self.said else f"({name})",
            printable(self.date) or "not recorded",
            str(self.since) if self.stale else "",
            "; ".join(filter(None, (changed, self.why))),
        )


HEADINGS = ("code", "file", "measured at", "on", "commits since", "what has changed")


def files(root: Path) -> list[str]:
    """Return the paths of all files of results, in their folder."""
    return sorted(path.relative_to(root / RESULTS).as_posix() for path in (root / RESULTS).rglob("*.json"))


def figure_of(file: str) -> Figure:
    """Return what is declared of a file: the first whose pattern it is of.

    Raises:
        FigureError: nothing is declared of it.
    """
    path = Path(file)
    for figure in FIGURES:
        if len(path.parts) == len(Path(figure.files).parts) and path.match(figure.files):
            return figure
    raise FigureError(f"{printable(file)}: benchmarks/stale.py does not say what it measures")


def _words(file: str) -> dict[str, str]:
    """Return the words that stand for a file in what is declared."""
    path = Path(file)
    rate = re.search(r"200mbit|1gbit|none", path.stem)
    folder = path.parts[0]
    return {
        "file": file, "folder": folder, "stem": path.stem, "study": folder.removesuffix("-speed"),
        "rate": rate[0] if rate else "",
    }  # fmt: skip


def measured(file: str) -> tuple[str, ...]:
    """Return the paths of the code that a file measures."""
    return tuple(path.format(**_words(file)) for path in figure_of(file).measures)


def commands(file: str) -> list[list[str]]:
    """Return the commands that measure a file anew.

    Raises:
        FigureError: the name may not go into a command, or no command measures it.
    """
    if not _NAME.fullmatch(file):
        raise FigureError(f"{printable(file)}: no name of a file of results")
    figure = figure_of(file)
    if not figure.renew:
        raise FigureError(f"{file}: no one command measures it")
    return [[word.format(**_words(file)) for word in shlex.split(command)] for command in figure.renew]


def ages(root: Path, names: Sequence[str] | None = None) -> Iterator[Age]:
    """Yield the age of each file of results of a clone.

    Args:
        root: root of the clone.
        names: files; None: all.
    """
    history = _History(root)
    for file in files(root) if names is None else names:
        commits, date = _origin(read(root / RESULTS / file))
        said = bool(commits)
        commits = commits or tuple(filter(None, [history.last(file)]))
        yield _age(history, file, commits, said, date)


def _origin(record: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the commits and the date that a file says; files of the matrix say them of each of their cells."""
    parts = (record.get(name) for name in ("about", "about_lab"))
    records = [record, *(one for one in parts if isinstance(one, dict))]
    if all(isinstance(one, dict) and "rows" in one for one in record.values()):
        records = list(record.values())
    texts = [str(one["commit"]) for one in records if one.get("commit")]
    commits = dict.fromkeys(part for text in texts for part in text.split(", "))
    dates = sorted({str(one["date"]) for one in records if one.get("date")})
    return tuple(commits), " to ".join(dates[:: max(1, len(dates) - 1)])


def _age(history: _History, file: str, commits: tuple[str, ...], said: bool, date: str) -> Age:
    paths = measured(file)
    wrong = [name for name in commits if not _COMMIT.fullmatch(name)]
    if not commits or wrong:
        why = (
            f"no commit: {printable(', '.join(wrong))}" if wrong else "not committed, and no commit recorded"
        )
        return Age(file, tuple(map(printable, commits)), said, date, None, why=why)
    names = [name.removesuffix("-dirty") for name in commits]
    found = [history.since(name, paths) for name in names]
    if any(one is None for one in found):
        return Age(file, commits, said, date, None, why="not in this clone")
    known = [one for one in found if one is not None]
    changed = dict.fromkeys(path for _, some in known for path in some)
    dirty = any(name.endswith("-dirty") for name in commits)
    why = "measured with changes that were not committed" if dirty else ""
    return Age(
        file, commits, said, date, bool(changed) or dirty, max(count for count, _ in known), tuple(changed), why
    )  # fmt: skip


class _History:
    """Ask git about the history of a clone, each question once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.since = cache(self._since)
        self._last: dict[str, str] | None = None

    def last(self, file: str) -> str | None:
        """Return the last commit that changed a file of results."""
        if self._last is None:
            self._last = {}
            log = self._git(
                "-c", "core.quotepath=off", "log", "--format=%x00%h", "--name-only", "--", str(RESULTS)
            )
            for entry in (log or "").split("\0")[1:]:
                name, *paths = entry.split("\n")
                for path in filter(None, paths):
                    self._last.setdefault(path, name)
        return self._last.get(f"{RESULTS.as_posix()}/{file}")

    def _since(self, commit: str, paths: tuple[str, ...]) -> tuple[int, tuple[str, ...]] | None:
        """Return how many commits since one changed paths, and which paths differ now; None without such a commit."""
        names = self._git("diff", "--name-only", "-z", commit, "--", *paths)
        count = self._git("rev-list", "--count", f"{commit}..HEAD", "--", *paths)
        if names is None or count is None:
            return None
        differ = names.split("\0")
        return int(count), tuple(
            path for path in paths if any(one == path or one.startswith(f"{path}/") for one in differ)
        )

    def _git(self, *arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(self._root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", check=False)
        return done.stdout.rstrip("\n") if done.returncode == 0 else None


def table(found: Sequence[Age]) -> str:
    """Return a table of ages, the stale ones first."""
    order = {True: 0, None: 1, False: 2}
    rows = [HEADINGS, *(age.cells() for age in sorted(found, key=lambda age: order[age.stale]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    stale = sum(age.stale is True for age in found)
    unsaid = sum(not age.said for age in found)
    said = (
        f"{stale} of {len(found)} files of results are stale. {unsaid} do not say their commit: in brackets is the "
        "last that changed them, and what they measure is as old or older."
    )
    return "\n".join([*lines, "", said])


def renew(names: Sequence[str], root: Path) -> int:
    """Measure files anew; return 0, or the exit status of a command that failed.

    Raises:
        FigureError: there is no such file, or no command measures it.
    """
    there = set(files(root))
    for name in names:
        if name not in there:
            raise FigureError(
                f"{printable(name)}: not one of the files of {RESULTS}; make figures lists them"
            )
    todo = list(dict.fromkeys(tuple(command) for name in names for command in commands(name)))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for command in todo:
        print(f"+ {shlex.join(command)}", flush=True)
        status = subprocess.run(command, cwd=root, env={**os.environ, "PATH": path}, check=False).returncode
        if status:
            print(f"stale.py: exit status {status}", file=sys.stderr)
            return status if status > 0 else 1
    print(
        "measured; tests/test_readme.py names the scripts of benchmarks/pages whose pages differ from it now"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or renew; return 2 for a file that there is not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--renew", metavar="FILES", help="measure these anew: paths in the folder of results, apart by blanks"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.renew is not None:
            return renew(arguments.renew.split(), ROOT)
        print(table(list(ages(ROOT))))
    except FigureError as error:
        print(f"stale.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
