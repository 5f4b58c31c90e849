"""Cases that this session of pytest runs, for tests that run several in one start of ranks."""

from __future__ import annotations

from typing import Any

PARAMS: list[dict[str, Any]] = []  # parameters of each test that has any; tests/conftest.py fills it


def is_asked(name: str, value: object, **others: object) -> bool:
    """Whether a test runs whose parameter ``name`` is ``value``, and which has ``others`` as well or not at all."""
    return any(
        name in params
        and params[name] == value
        and all(params.get(other, wanted) == wanted for other, wanted in others.items())
        for params in PARAMS
    )
