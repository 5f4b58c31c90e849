"""Calls drawn for seconds; ``make mpi-differential`` draws for minutes."""

from __future__ import annotations

import itertools

import pytest

from tests.mpi4py_differential.calls import ROWS
from tests.mpi4py_differential.draws import CALLS, refuse_alone, simplest
from tests.mpi4py_differential.pool import Pool
from tests.mpi4py_differential.search import Search, shown
from tests.mpi4py_differential.verdict import POLICIES

DRAWS = 120
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=[2, 3])
def pool(request):
    with Pool(request.param) as ranks:
        yield ranks


def test_calls_do_as_on_plain_mpi4py(pool):
    search = Search(pool, CALLS, list(POLICIES))
    found = [shown(f) for f in search.round(pool.ranks, DRAWS, set())]
    assert not found, "\n".join(found)
    assert search.draws == DRAWS


def test_an_error_of_one_rank_reaches_all(pool):
    """Each collective, blocking and not and persistent, with one wrong argument on one rank, under one policy each."""
    found = []
    rows = [row for row in ROWS.values() if row.refusable]
    for number, (mode, row) in enumerate(itertools.product(("", "I", "_init"), rows)):
        draw = simplest(row.name, pool.ranks) | {"mode": mode}
        refuse_alone(draw, row, number % pool.ranks, number + 5 * pool.ranks)
        differs = pool.check(draw, [list(POLICIES)[number % len(POLICIES)]])
        if differs is not None:
            found.append(shown(differs))
            if len(found) == 3:  # each waits for its timeout
                break
    assert not found, "\n".join(found)
