"""Run a part of each test's cases where ``HC_PART`` asks for one.

``K/N`` is part K, from 0, of N parts: every N-th of the cases of each test function, in an order drawn by their names,
and at least one. ``!K/N`` is all but those. Functions that are marked ``long`` are drawn as if they were cases of
one function. All ranks draw the same.
"""

from __future__ import annotations

import os
import zlib
from itertools import groupby

import pytest

from tests.asked import PARAMS


@pytest.hookimpl(trylast=True)  # after other options have left some out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = os.environ.get("HC_PART")
    if asked is None:
        return
    part, _, parts = asked.removeprefix("!").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise pytest.UsageError(f"HC_PART must be K/N or !K/N with K from 0 to N - 1, not {asked!r}")
    inside = set()
    for _, cases in groupby(sorted(items, key=_function), key=_function):
        drawn = sorted(cases, key=lambda one: (zlib.crc32(one.nodeid.encode()), one.nodeid))
        inside.update(drawn[int(part) % len(drawn) :: int(parts)])
    kept = [one for one in items if (one in inside) != asked.startswith("!")]
    config.hook.pytest_deselected(items=[one for one in items if one not in set(kept)])
    items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    PARAMS.extend(item.callspec.params for item in session.items if hasattr(item, "callspec"))


def _function(item: pytest.Item) -> str:
    return "long" if item.get_closest_marker("long") else item.nodeid.partition("[")[0]
