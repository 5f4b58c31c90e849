"""Damage, truncate, delay or drop one message of an operation: all ranks hold the right bits, or all have an error."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.compiled import shared_library
from tests.faults.launched import outcome_of
from tests.faults.outcome import Outcome

KINDS = ("damage", "truncate", "delay", "drop")
_SECONDS = 100.0  # on a busy machine: the ranks take some 10
_SHIM = Path(__file__).with_name("isend.c")
_IN_PYTHON = 0.3  # share of scenarios with steps in Python, as for devices, not in the compiled engine


def scenario(seed: int, cases: int = 12) -> Outcome:
    """Run operations on 2 to 5 ranks, each with a fault in one message; see :mod:`.message_ranks`.

    Args:
        seed: decides ranks, operations, algorithms, codecs, sizes and faults.
        cases: number of operations.

    Raises:
        AssertionError: ranks differ, one has wrong bits or no error, or they do not end.
    """
    draw = random.Random(seed)
    ranks, python = draw.randint(2, 5), draw.random() < _IN_PYTHON
    return outcome_of(
        ranks,
        "tests.faults.messages.message_ranks",
        *(str(seed), str(cases), str(shared_library(_SHIM)), "python" if python else "engine"),
        seconds=_SECONDS,
        HYBRIDCOMP_SHARED_MEMORY="0",
    )
