"""Processes that live long: tags come round, communicators come and go with faults, and nothing is left of them.

``python -m tests.faults.age.age --operations 100000 --communicators 2000`` (``make age``) takes some minutes.
"""

from __future__ import annotations

import argparse
import random

from tests.faults.launched import outcome_of
from tests.faults.outcome import Outcome

_SECONDS = 60.0


def scenario(
    seed: int, operations: int = 3_000, communicators: int = 80, seconds: float = _SECONDS
) -> Outcome:
    """Do operations on two communicators, then make others with faults between: see :mod:`.age_ranks`.

    Args:
        seed: decides ranks, shared memory, operations and faults.
        operations: number of operations on the first two communicators.
        communicators: number of communicators made after them.
        seconds: seconds that the run may take.

    Raises:
        AssertionError: a result or an error is not as it must be, something has grown, or a rank does not end.
    """
    draw = random.Random(seed)
    ranks, shared = draw.choice([2, 2, 3]), draw.choice("01")
    return outcome_of(
        ranks,
        "tests.faults.age.age_ranks",
        *(str(seed), str(operations), str(communicators)),
        seconds=seconds,
        HYBRIDCOMP_SHARED_MEMORY=shared,
        HYBRIDCOMP_SUMMARY="0",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--communicators", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=1_800.0)
    arguments = parser.parse_args()
    print(scenario(arguments.seed, arguments.operations, arguments.communicators, arguments.seconds))
