"""Start ranks for the tests of this folder."""

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.asked import is_asked
from tests.warm import python

_DEVICE = "HYBRIDCOMP_TEST_DEVICE"  # the ranks', too
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
_LAUNCH_SECONDS = 280.0  # for all cases of a module; less than a test may take
_TELL_SECONDS = 250.0  # when its ranks say where they are
# Where its ranks find modules: in this checkout first.
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def mpiexec(ranks: int, *argv: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program on several ranks; output is captured."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else "mpiexec"
    # Unbuffered ranks write a line and its end apart, and those of two ranks would mix.
    unlike = ("PMI", "HYBRIDCOMP", "MASTER_", "PYTHONUNBUFFERED")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(unlike) or k == _DEVICE}
    return subprocess.run(
        [launcher, "-n", str(ranks), python(), *argv],
        env={**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        restore_signals=False,  # as a lab starts programs
    )


def case_names(module: str) -> list[str]:
    """Return the cases of a module, without importing it."""
    tree = ast.parse((HERE / "cases" / f"{module}.py").read_text(encoding="utf-8"))
    return [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    ]


@functools.cache
def run_cases(module: str, ranks: int) -> dict[str, str]:
    """Run the cases of a module that are asked for, once; return what went wrong by case ('' is well), and under ''
    how the run ended if not well."""
    cases = [case for case in case_names(module) if is_asked("case", case, ranks=ranks)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "verdicts.json"
        try:
            worker = (str(HERE / "worker.py"), module, str(_TELL_SECONDS), str(out))
            done = mpiexec(ranks, *worker, *cases, timeout=_LAUNCH_SECONDS)
            well = not done.returncode and out.exists()
            end = "" if well else f"ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        except subprocess.TimeoutExpired as late:
            said = b"".join(filter(None, (late.stdout, late.stderr)))
            end = f"did not end within {late.timeout:g} s:\n{said.decode(errors='replace')}"
        verdicts: dict[str, str] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        return verdicts | {"": end and f"{module} on {ranks} ranks {end}"}


def check_case(module: str, ranks: int, case: str) -> None:
    """Assert that a case passed on all ranks."""
    verdicts = run_cases(module, ranks)
    went_wrong = verdicts.get(case) or verdicts[""]
    assert not went_wrong, went_wrong
