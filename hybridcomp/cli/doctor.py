"""Run ``hybridcomp doctor``: tell what is installed and works, and how fast; ``--calibrate`` measures links, codecs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hybridcomp import style
from hybridcomp.cli import inspection
from hybridcomp.cli.inspection import Findings
from hybridcomp.errors import ConfigError
from hybridcomp.files import write_text
from hybridcomp.launcher import check_launcher, check_room, check_world, inside_mpi
from hybridcomp.perfmodel import BUILT_IN, Profile, load_profile, wanted_path

if TYPE_CHECKING:
    from mpi4py import MPI

EXAMPLES = """examples:
  hybridcomp doctor
  mpiexec -n 8 hybridcomp doctor --calibrate                       # on the nodes that will be used
  hybridcomp lab -n 4 --rate 1gbit -- hybridcomp doctor --calibrate --out lab.toml

Under mpiexec all ranks take part and rank 0 prints. --calibrate needs two ranks on a host to measure shared memory, two
hosts to measure the network. It fits the costs of collectives to measured ones, and says how far predictions are off on
sizes that the fit was not given (with the extra plan, which brings SciPy). The profile is read from where
HYBRIDCOMP_PROFILE says, else from ~/.config/hybridcomp/profile.toml. The exit code is 0 if hybridcomp can be used here,
else 1.
"""
_SECONDS, _QUICK_SECONDS = 0.4, 0.02  # seconds for each codec whose speed is shown
_ERRORS = "error of predicted collectives"
_UNUSABLE = 1
_WRONG_INPUT = 2


class Calibrated(NamedTuple):
    """Results of a calibration.

    Attributes:
        profile: speeds of links, memory and codecs.
        others: text of the sections in the profile's file that :class:`Profile` does not read.
        notes: parts that were not measured, and why.
        errors: errors of the profile's predictions of collectives, in words, at sizes that no fit was given.
    """

    profile: Profile
    others: str
    notes: list[str]
    errors: dict[str, str]


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp doctor``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp doctor",
        description="Say what is installed and works here, and how fast; measure links and codecs for a profile.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, too")
    result.add_argument(
        "--calibrate",
        action="store_true",
        help="measure links, memory, codecs, collectives and a model's operations, and write the profile (a minute)",
    )
    result.add_argument(
        "--out", type=Path, metavar="FILE", help="where --calibrate writes (default: as above)"
    )
    result.add_argument("--quick", action="store_true", help="measure for a second; rough")
    return result


def main(argv: list[str]) -> int:
    """Run ``hybridcomp doctor ARGV`` and return the exit code: 0 if hybridcomp can be used, else 1.

    Raises:
        ConfigError: wrong arguments, or a file that cannot be written.
        CollectiveTimeoutError: another rank no longer answers.
    """
    arguments = parser().parse_args(argv)
    if arguments.out is not None and not arguments.calibrate:
        raise ConfigError("--out goes with --calibrate; --json FILE keeps what doctor finds")
    findings = Findings()
    findings.sections["versions"] = inspection.versions()
    findings.sections["kernels"] = inspection.kernels(findings)
    try:  # MPI would end this process in its own words
        check_launcher()
        if not inside_mpi():
            check_room(1)
    except ConfigError as error:
        findings.problems.append(str(error))
        return _tell(findings, arguments, None)
    try:
        from mpi4py import MPI  # noqa: PLC0415  (initialises MPI; and what fails here is to be told)
    except (ImportError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        findings.problems.append(
            f"mpi4py cannot load MPI ({first}): `pip install mpich` brings MPICH, or load the site's MPI"
        )
        return _tell(findings, arguments, None)
    try:
        check_world(MPI.COMM_WORLD.size, MPI.Get_library_version())
    except ConfigError as error:
        findings.problems.append(str(error))
    return _main_as_rank(MPI.COMM_WORLD, findings, arguments)


def _main_as_rank(comm: MPI.Comm, findings: Findings, arguments: argparse.Namespace) -> int:
    """Run the rest on each rank of ``comm``; return rank 0's exit code."""
    from hybridcomp.cli.calibration import collectives, machine, ranks  # noqa: PLC0415  (need MPI)

    hosts, shares_memory = machine.hosts_of(comm)
    findings.sections["MPI"] = inspection.mpi(comm, hosts.count, shares_memory)
    (unusable,) = ranks.gathered(comm, [float(bool(findings.problems))])
    if any(unusable) and not findings.problems:
        those = ", ".join(str(rank) for rank, problems in enumerate(unusable) if problems)
        findings.problems.append(
            f"hybridcomp cannot be used on every rank (not on {those}): run doctor on their hosts"
        )
    calibrated = measured = None
    effort = machine.QUICK if arguments.quick else machine.THOROUGH
    if arguments.calibrate and ranks.agreed(comm, not findings.problems):
        profile, more = machine.calibrate(comm, hosts, _old(), effort)
        measured, why = collectives.measure(comm, hosts, effort)
        compute, notes = machine.compute(comm, effort)
        calibrated = Calibrated(profile, compute and f"\n{compute}", [*more, *why, *notes], {})
    if comm.rank:
        return ranks.shared(comm, 0)
    code = _WRONG_INPUT
    try:
        if calibrated is not None and measured is not None:
            profile, errors, notes = collectives.refine(calibrated.profile, measured, effort)
            calibrated = Calibrated(profile, calibrated.others, [*calibrated.notes, *notes], errors)
        code = _tell(findings, arguments, calibrated)
    finally:  # the others wait for rank 0
        ranks.shared(comm, code)
    return code


def _old() -> Profile:
    """Return the profile whose values stay where a new calibration does not measure them."""
    try:
        return load_profile()
    except ConfigError:  # the file is damaged: a new profile is the way out
        return BUILT_IN


def _tell(findings: Findings, arguments: argparse.Namespace, calibrated: Calibrated | None) -> int:
    """Inspect the rest, print all findings and write files; return the exit code."""
    console = style.console()
    if not findings.problems:
        findings.speeds = inspection.speeds(_QUICK_SECONDS if arguments.quick else _SECONDS)
    findings.sections["GPU"] = inspection.gpu()
    written = None
    if calibrated is not None:
        written = arguments.out or wanted_path()
        calibrated.profile.write(written, calibrated.others)
    findings.sections["profile"] = inspection.profile(findings)
    _show(findings, console)
    if calibrated is not None:
        rows = inspection.describe(dataclasses.replace(calibrated.profile, name=str(written)))
        _section(console, "calibrated", rows)
        if calibrated.errors:
            findings.sections[_ERRORS] = calibrated.errors
            _section(console, _ERRORS, calibrated.errors)
        for note in calibrated.notes:
            console.print(note, highlight=False, markup=False)
    elif arguments.calibrate:
        console.print("Nothing was calibrated: see the problems above.", highlight=False)
    if arguments.json is not None:
        _write_json(findings, arguments.json)
    return _UNUSABLE if findings.problems else 0


def _show(findings: Findings, console: Console) -> None:
    for title, rows in findings.sections.items():
        _section(console, title, rows)
    if findings.speeds:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for heading in ("fp32 on one thread", "encode GB/s", "x memcpy", "decode GB/s", "x memcpy"):
            table.add_column(heading, justify="left" if heading.startswith("fp32") else "right", no_wrap=True)
        for name, row in findings.speeds.items():
            cells = ("encode_gb_s", "encode_ratio", "decode_gb_s", "decode_ratio")
            table.add_row(name, *(f"{row[cell]:.2f}" for cell in cells))
        console.print(table)
        console.print()
    for problem in findings.problems:
        console.print(f"problem: {problem}", highlight=False, markup=False)


def _section(console: Console, title: str, rows: dict[str, str]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print()


def _write_json(findings: Findings, path: Path) -> None:
    write_text(path, json.dumps(findings.as_json(), indent=2) + "\n")
