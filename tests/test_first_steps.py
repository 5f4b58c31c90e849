"""One sentence says what a newcomer lacks: by the Makefile, by CMake, by the demonstration."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridcomp.cli.main import main
from hybridcomp.errors import missing_module
from tests.packages import modules

ROOT = Path(__file__).parents[1]
# A Python that refuses what holds one word, as one does that lacks a module.
PYTHON = """#!/bin/sh
case "$*" in *{word}*) {answer} ;; esac
exec {python} "$@"
"""

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
_OPTIONS = r"(?: (?:--extra-index-url|-C) [^\s`'\"]+)*"
INSTALL = re.compile(rf"pip install{_OPTIONS} (?P<what>'[^']+'|[\w.-]*[\w.]){_OPTIONS}")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the text of each page, and each string of each module, with the file's name."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "slurm").iterdir()]
    for path in pages:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in [*modules(), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield path.relative_to(ROOT).as_posix(), "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.relative_to(ROOT).as_posix(), node.value


def install_lines() -> dict[str, set[str]]:
    """Return the install lines of pages and errors, and where each stands; lines that are no command stand alone."""
    found: dict[str, set[str]] = {}
    for name, text in texts():
        if name == "hybridcomp/errors.py":  # the extra is an argument
            continue
        joined = re.sub(r" \\\n\s*", " ", text)  # as a shell reads lines that go on
        for start in re.finditer(r"pip install", joined):
            line = INSTALL.match(joined, start.start())
            found.setdefault(line[0] if line else joined[start.start() :][:80], set()).add(name)
    for extra in ("train", "plan"):
        line = INSTALL.search(str(missing_module("torch", extra)))
        assert line is not None
        found.setdefault(line[0], set()).add("hybridcomp/errors.py")
    return found


LINES = install_lines()


def test_install_lines_name_what_there_is():
    """The package is on no index: lines name a clone's extras, or packages that the package needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {re.split(r"[<>=\[]", one)[0] for one in sum(extras.values(), project["dependencies"])}
    assert len(LINES) > 5
    for text, where in LINES.items():
        line = INSTALL.fullmatch(text)
        assert line is not None, f"no install line: {text!r} in {where}"
        package, _, asked = line["what"].strip("'").partition("[")
        names = asked.rstrip("]").split(",") if asked else []
        assert package in (needed if package != "." else ["."]), f"{text!r} in {where}"
        assert set(names) <= set(extras), f"{text!r} in {where}"
        brings_torch = any(one.startswith("torch") for name in names for one in extras[name])
        assert (CPU_WHEELS in text) == brings_torch, f"{text!r} in {where}"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "env"
    venv.create(folder, with_pip=True)
    return folder


@pytest.mark.parametrize("line", sorted(LINES))
def test_install_lines_work(fresh, line):
    """pip finds all that a line asks for, and would install it; the gate installs a wheel by itself (.ci/wheel.sh)."""
    wanted = INSTALL.fullmatch(line)["what"].strip("'").partition("[")[0]
    how = (
        "--dry-run" if wanted == "." else "--dry-run --no-deps"
    )  # whether another's package exists takes no more
    done = subprocess.run(
        ["bash", "-c", f"{line} {how}"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{fresh}/bin:{os.environ['PATH']}", "PIP_RETRIES": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    would = next(one for one in done.stdout.splitlines() if one.startswith("Would install "))
    assert f" {'hybridcomp' if wanted == '.' else wanted}-" in would


def check_tools(folder: Path, word: str = "nothing", answer: str = "exit 1", **variables: str) -> str:
    """Return the first line of what ``make check-tools`` says, which fails."""
    python = folder / "python"
    python.write_text(PYTHON.format(word=word, answer=answer, python=sys.executable))
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "check-tools", f"PYTHON={python}"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    return done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ensurepip", "missing: Python's venv (Debian, Ubuntu: apt-get install python3-venv)"),
        ("Python.h", "missing: Python's headers (Debian, Ubuntu: apt-get install python3-dev)"),
    ],
)
def test_what_python_lacks(tmp_path, word, said):
    assert check_tools(tmp_path, word) == said


def test_an_old_python(tmp_path):
    said = check_tools(tmp_path, "version_info", "exit 1")
    assert "hybridcomp needs Python 3.11 to 3.13 (make PYTHON=python3.12 ...)" in said


def test_make_without_a_compiler(tmp_path):
    said = check_tools(tmp_path, CXX="/no/such/compiler")
    assert said == "missing: a C++20 compiler (Debian, Ubuntu: apt-get install g++)"


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="needs CMake and Ninja"
)
def test_pip_without_a_compiler(tmp_path):
    """pip's output has CMake's, which says it once."""
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja"],
        env={**os.environ, "CXX": "/no/such/compiler"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert said.count("CMake Error") == 1
    assert "found no C++20 compiler: install one (Debian, Ubuntu: apt-get install g++)" in said


def test_a_folder_that_cannot_be_written_to(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["demo", "--out", str(file / "demo")]) == 2
    last = capsys.readouterr().err
    assert last == f"hybridcomp demo: error: cannot write to {file}/demo: Not a directory\n"
