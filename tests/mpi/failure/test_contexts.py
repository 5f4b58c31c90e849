"""A process that makes many communicators and frees none is warned before the contexts of MPI are used up."""

from __future__ import annotations

import warnings

import pytest

import hybridcomp as hc
from hybridcomp.collectives.agreement import making
from hybridcomp.collectives.failure import release
from hybridcomp.collectives.failure.contexts import Contexts
from tests.mpi.conftest import WORLD, verdict


@pytest.fixture
def contexts(monkeypatch):
    """Count the contexts of a process that is warned at its third communicator."""
    counted = Contexts(many=3)
    monkeypatch.setattr(making, "contexts", counted)
    monkeypatch.setattr(release, "contexts", counted)
    return counted


def test_the_warning_comes_once_and_says_what_to_do(contexts):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = [hc.Communicator(WORLD, "none") for _ in range(2)]
        early = len(seen)
        made += [hc.Communicator(WORLD, "none") for _ in range(2)]
    for comm in made:
        comm.Free()
    verdict(early == 0)
    verdict([one.category for one in seen] == [RuntimeWarning])
    verdict("communicator 3 of this process" in str(seen[0].message) and "Free()" in str(seen[0].message))
    verdict(seen[0].filename == __file__, seen[0].filename)


def test_those_that_are_freed_do_not_count(contexts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            hc.Communicator(WORLD, "none").Free()
            WORLD.Barrier()
            release.collect()
    verdict(contexts.held <= 1)  # all have agreed on all but, maybe, the last


def test_where_it_is_an_error_on_one_rank_the_others_are_told(contexts):
    made = [hc.Communicator(WORLD, "none") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if WORLD.rank == 0 else "ignore")
        try:
            hc.Communicator(WORLD, "none")
            error = None
        except Exception as raised:
            error = raised
    for comm in made:
        comm.Free()
    wanted = RuntimeWarning if WORLD.rank == 0 else hc.RemoteError
    verdict(isinstance(error, wanted), repr(error))
