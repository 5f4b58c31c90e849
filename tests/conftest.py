"""Run a part of the tests where ``HC_PART`` asks for one.

``few`` is what ``make test`` runs: a case of each test function where tests are quick, and of one function in four, at
least one of each file, in the folders of ``_SLOW``; none that is marked ``long``. ``K/N`` is part K, from 0, of N parts
of all others: of the cases of each test function every N-th, in an order drawn by their names. So ``few`` and the N
parts are all tests, and have none in common. Several are joined by commas: ``few,1/4``. All ranks draw the same.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import pytest

from tests.asked import PARAMS

# Their tests start ranks or programs, or run CUDA's kernels on the emulation: seconds each.
_SLOW = {"benchmarks", "compare", "cuda", "demo", "emulation", "examples", "faults", "lab", "mpi",
         "mpi4py_differential", "mpi4py_suite", "peer", "plugin", "pmi", "soak", "study", "top", "torch", "train",
         "warm"}  # fmt: skip
# A shell has what it starts in the background ignore SIGINT, and every program that this starts in turn: those of tests
# that are interrupted would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_WRONG = "HC_PART must be few, K/N with K from 0 to N - 1, or several of them joined by commas, not {!r}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    few = set(few_of(items))  # before other options leave some out: the few do not depend on them
    yield
    asked = os.environ.get("HC_PART")
    if asked is not None:
        wanted = asked_of(items, few, asked)
        config.hook.pytest_deselected(items=[one for one in items if one not in wanted])
        items[:] = [one for one in items if one in wanted]


def pytest_collection_finish(session: pytest.Session) -> None:
    PARAMS.extend(item.callspec.params for item in session.items if hasattr(item, "callspec"))


def asked_of(items: list[pytest.Item], few: set[pytest.Item], asked: str) -> set[pytest.Item]:
    """Return the tests that a value of ``HC_PART`` asks for."""
    wanted: set[pytest.Item] = set()
    for word in asked.split(","):
        part, _, parts = word.partition("/")
        if word == "few":
            wanted |= few.intersection(items)
        elif part.isdecimal() and parts.isdecimal() and int(part) < int(parts):
            wanted.update(_part((one for one in items if one not in few), int(part), int(parts)))
        else:
            raise pytest.UsageError(_WRONG.format(asked))
    return wanted


def few_of(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Yield a case of each function, or of each fourth one of a file."""
    short = [one for one in items if not one.get_closest_marker("long")]
    for file, of_file in _grouped(short, lambda one: one.nodeid.partition("::")[0]):
        functions = sorted(_grouped(of_file, _function), key=lambda one: _drawn(one[0]))
        slow = file.split("/")[1] in _SLOW
        for _, cases in functions[:: 4 if slow else 1]:
            yield min(cases, key=lambda one: _drawn(one.nodeid))


def _part(items: Iterable[pytest.Item], part: int, parts: int) -> Iterable[pytest.Item]:
    """Yield a part of the cases of each function; functions begin with different parts, as many have one case."""
    for function, cases in _grouped(items, _function):
        drawn = sorted(cases, key=lambda one: _drawn(one.nodeid))
        yield from drawn[(part + zlib.crc32(function.encode())) % parts :: parts]


def _grouped(
    items: Iterable[pytest.Item], key: Callable[[pytest.Item], str]
) -> list[tuple[str, list[pytest.Item]]]:
    return [(name, list(group)) for name, group in groupby(sorted(items, key=key), key=key)]


def _drawn(name: str) -> tuple[int, str]:
    """Return where a name is in the order in which cases are drawn."""
    return zlib.crc32(name.encode()), name


def _function(item: pytest.Item) -> str:
    """Return the function whose case a test is; tests that take long are cases of one."""
    return "long" if item.get_closest_marker("long") else item.nodeid.partition("[")[0]
