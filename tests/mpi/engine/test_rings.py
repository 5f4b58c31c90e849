"""Shared memory goes back: rings with their communicator, pages that are no longer used to the system."""

from __future__ import annotations

import gc

import numpy as np
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.engine.groups import native_engine, own_arena
from hybridcomp.collectives.failure.release import collect
from tests.mpi.conftest import WORLD, communicator, verdict
from tests.soak.measure import held

MADE = 60
PERIOD = 50  # blocks given back, from one time to the next at which pages go back


def test_the_next_group_gets_the_rings_that_one_has_given_back():
    communicator().Free()  # there is an arena then, if there is to be one
    module = native_engine()
    one, two, three = (module.engine_group(MPI._handleof(WORLD), 0, 2, False) for _ in range(3))
    at = one.take_rings(1)
    other = two.take_rings(1)
    one.give_rings()
    one.give_rings()  # has no effect
    verdict(three.take_rings(1) == at != other)
    two.give_rings()
    three.give_rings()


def life() -> None:
    """Make a communicator, use it, and free it."""
    comm = hc.Communicator(WORLD, "none", "dp", timeout=30.0)
    comm.Allreduce(MPI.IN_PLACE, np.ones(4_000, np.float32), codec="int8")
    comm.Free()
    WORLD.Barrier()  # all have agreed
    collect()


def test_freed_communicators_leave_no_shared_memory():
    for _ in range(5):
        life()
    gc.collect()
    before = held().shared_mb
    for _ in range(MADE):
        life()
    grown = held().shared_mb - before
    verdict(grown < 0.25, f"{grown} MB of {MADE} communicators")  # 16 KiB each and neighbour, if they stayed


def test_pages_of_messages_that_were_large_once_go_back(make):
    """Or a program that sends messages of many sizes would hold the most of each size that it ever needed."""
    comm = make("none")
    shares = comm.size > 1 and own_arena() is not None
    usual = native_engine().engine_trim_period(PERIOD)

    def small() -> None:
        x = np.ones(2_000, np.float32)
        for _ in range(PERIOD):
            comm.Allreduce(MPI.IN_PLACE, x, codec="int8", algorithm="direct")
        WORLD.Barrier()  # the pages of all ranks are counted

    small()
    small()  # what earlier tests have used is gone, too
    before = held().shared_mb
    arrays = [np.ones(1 << 20, np.float32) for _ in range(4)]
    for request in [comm.Iallreduce(MPI.IN_PLACE, x, codec="fp16", algorithm="direct") for x in arrays]:
        request.wait()
    most = held().shared_mb - before
    for _ in range(3):
        small()
    native_engine().engine_trim_period(usual)
    left = held().shared_mb - before
    verdict(left < 2 and (most > 5 or not shares), f"{most} MB, later {left} MB")
    x = np.full(1 << 20, 2.0, np.float32)  # in the memory that was given back
    comm.Allreduce(MPI.IN_PLACE, x, codec="fp16", algorithm="direct")
    verdict(bool((x == 2 * comm.size).all()))
