"""Run a part of these tests where ``HC_PART`` asks for one.

``K/N`` is part K, from 0, of N parts, the same ones wherever they are run; ``!K/N`` is all but that.
"""

from __future__ import annotations

import os
import zlib

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = os.environ.get("HC_PART")
    if asked is None:
        return
    part, _, parts = asked.removeprefix("!").partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise pytest.UsageError(f"HC_PART must be K/N or !K/N with K from 0 to N - 1, not {asked!r}")
    within = [zlib.crc32(one.nodeid.encode()) % int(parts) == int(part) for one in items]
    kept = [one for one, inside in zip(items, within, strict=True) if inside != asked.startswith("!")]
    config.hook.pytest_deselected(items=[one for one in items if one not in set(kept)])
    items[:] = kept
