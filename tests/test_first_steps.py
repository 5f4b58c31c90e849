"""One sentence says what a newcomer lacks: by the Makefile, by CMake, by the demonstration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.cli.main import main

ROOT = Path(__file__).parents[1]
# A Python that refuses what holds one word, as one does that lacks a module.
PYTHON = """#!/bin/sh
case "$*" in *{word}*) {answer} ;; esac
exec {python} "$@"
"""


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
