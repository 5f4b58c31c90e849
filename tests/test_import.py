"""Imports load what they need and no more, and modules read no private names of others."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.packages import ROOT, modules

CHECK = """
import sys
import hybridcomp
hybridcomp.get_codec("int8").encode(__import__("numpy").ones(9, "float32"))
hybridcomp.load_policy("hybrid")
loaded = [m for m in ("torch", "cupy", "mpi4py.MPI") if m in sys.modules]
assert not loaded, loaded
"""


def test_import_loads_neither_torch_nor_cupy_nor_mpi():
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=60)


def test_unknown_attribute_is_an_attribute_error():
    code = 'import hybridcomp as h\ntry:\n    h.nothing\nexcept AttributeError as e:\n    assert "nothing" in str(e)'
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


WITHOUT_KERNELS = """
import sys
sys.modules["hybridcomp._kernels"] = None
import hybridcomp.cli.main, hybridcomp_lab.demo.output, hybridcomp_lab.train.trainer
from hybridcomp.collectives.failure.signals import deferral
try:
    with deferral:
        raise SystemExit("entered")
except hybridcomp.errors.NativeUnavailableError as error:
    assert "compiled kernels are missing" in str(error), error
"""


def test_modules_can_be_imported_before_the_kernels_are_compiled():
    """As the Makefile does to compile them to Python's bytecode beside the C++ compiler."""
    subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], check=True, timeout=60)


def test_the_hook_needs_no_mpi():
    """On gloo and NCCL nothing initialises MPI, which starts threads."""
    code = "import sys, hybridcomp.torch as hct\nhct.comm_hook\nassert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


MOVED = """
import sys, warnings
from hybridcomp.moved import MOVED
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from hybridcomp.lab import Lab
    from hybridcomp.lab.rate import Rate
    import hybridcomp.train.config as config
    for room in MOVED:
        __import__(room)
from hybridcomp.net import Lab as there
from hybridcomp.net.rate import Rate as rate
from hybridcomp_lab.train.config import TrainConfig
assert Lab is there and Rate is rate and config.TrainConfig is TrainConfig
assert sys.modules["hybridcomp.lab"] is sys.modules["hybridcomp.net"]
assert [str(one.message).split()[0] for one in told] == ["hybridcomp.lab", "hybridcomp.train", *(
    room for room in MOVED if room not in ("hybridcomp.lab", "hybridcomp.train")
)], told
assert all(one.filename == "<string>" for one in told), told
assert sys.modules["hybridcomp.net"].__spec__.name == "hybridcomp.net"
for name in ("hybridcomp.nothing", "hybridcomp.lab.nothing"):
    try:
        __import__(name)
        raise SystemExit(name)
    except ModuleNotFoundError as error:
        assert "nothing" in error.name
"""


def test_modules_that_have_moved_are_found_by_their_old_names():
    """One release long, with a warning at the line that imports them: they are the same modules."""
    subprocess.run([sys.executable, "-c", MOVED], check=True, timeout=60)


# -- private names ---------------------------------------------------------------------------------------


# Names that ours share with objects of other packages: of named tuples, which have no others, and of torch's.
OTHERS = {
    "_replace",
    "_asdict",
    "_fields",
    "_field_defaults",
    "_world",
    "_fsdp_param_group",
    "_values",
    "_parameters",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined(tree: ast.AST) -> set[str]:
    """Return the private names that a module defines: functions, classes, variables, and attributes of its objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        found.add(part.id)
                    elif isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("self", "cls"):
                        found.add(part.attr)
    return {name for name in found if is_private(name)}


def reads(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module takes from other objects, or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridcomp"):
            yield from (alias.name for alias in node.names if is_private(alias.name))


@functools.cache
def trees() -> dict[str, ast.AST]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in modules()}


def foreign_reads(tree: ast.AST, everywhere: set[str]) -> list[str]:
    """Return the reads of private names that other modules of the package define, and this one does not."""
    own = defined(tree)
    return [name for name in reads(tree) if name in everywhere - own - OTHERS]


def test_modules_read_no_private_names_of_others():
    everywhere = set().union(*map(defined, trees().values()))
    found = {name: foreign_reads(tree, everywhere) for name, tree in trees().items()}
    assert {name: Counter(those) for name, those in found.items() if those} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("other._name", True),
        ("self._made()._name = 1", True),
        ("self.comm._name()", True),
        ("from hybridcomp.codecs import _name", True),
        ("self._name", False),
        ("other._foreign", False),  # of another package: it gives no other way
        ("other._own\nself._own = 1", False),
        ("other.__dict__", False),
    ],
)
def test_reads_of_private_names_are_seen(line, wrong):
    assert bool(foreign_reads(ast.parse(line), {"_name", "_made", "_own"})) == wrong


def test_the_contracts_count_imports_for_types():
    """Rooms that read each other's types alone are a circle to a reader, too."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert linter["exclude_type_checking_imports"] is False
    assert not any("ignore_imports" in contract for contract in linter["contracts"])


@pytest.mark.parametrize("name", ["Operation", "Group", "Parts", "Kind"])
def test_a_name_that_many_rooms_use_means_one_class(name):
    classes = [
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.removeprefix("_") == name
    ]
    assert len(classes) == 1, classes
