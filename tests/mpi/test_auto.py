"""The policy ``auto`` on ranks that measure for themselves: all choose alike, and nothing that was owed is lost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.session import NEVER
from hybridcomp.perfmodel import BUILT_IN
from tests.mpi.conftest import WORLD, gaussian, identical, total, verdict
from tests.mpi.hosts import Hosts

N = 1 << 16
STEPS = 300  # more than a trial has


@pytest.fixture
def automatic() -> Iterator:
    """Make communicators whose ranks pass for hosts; freed after the test."""
    made: list[hc.Communicator] = []

    def factory(policy: str, axis: str) -> hc.Communicator:
        made.append(hc.Communicator(Hosts(WORLD, range(WORLD.size)), policy, axis, timeout=30.0))
        return made[-1]

    yield factory
    for comm in made:
        comm.Free()


def choices(comm: hc.Communicator) -> list:
    return [] if comm.decider is None else comm.decider.choices()


def alike(comm: hc.Communicator) -> bool:
    mine = (comm.decider and comm.decider.version, comm.session.review_at, choices(comm))
    return all(one == mine for one in WORLD.allgather(mine))


def test_the_same_choices_at_the_same_operations_whatever_ranks_measure(automatic):
    comm = automatic("auto", "dp")
    versions = []
    out = np.empty(N, np.float32)
    for step in range(STEPS):
        if step % 3 == 0 and WORLD.rank == WORLD.size - 1:
            time.sleep(0.002)  # what this rank measures is shorter than what the others do
        comm.Allreduce(gaussian(N, seed=step % 5), out, name="w")
        versions.append(None if comm.decider is None else comm.decider.version)
    verdict(alike(comm))
    verdict(identical(np.array([v or 0 for v in versions])))
    verdict(identical(out))
    if WORLD.size > 1:
        assert comm.decider is not None
        verdict(comm.decider.version > 1, "options were tried")


def test_what_is_owed_is_never_lost_when_codecs_change(automatic):
    """The sum of all results, and of what ranks still keep, is the sum of what they gave."""
    comm = automatic("auto", "dp")
    missing, out = np.zeros(N), np.empty(N, np.float32)
    for step in range(STEPS):
        comm.Allreduce(gaussian(N, seed=step % 7), out, name="w")
        verdict(identical(out))
        missing += total(N, seed=step % 7) - out
    used = {row.codec for row in comm.stats()}
    kept = np.zeros(N)
    if len(comm.feedback):
        kept = WORLD.allreduce(
            comm.feedback.memory(("dp", "w"), N, form="ef").error.astype(np.float64), op=MPI.SUM
        )
    verdict(float(np.abs(kept - missing).max()) < 2e-3)
    if WORLD.size > 1:
        verdict(len(used) > 1, "codecs have changed")
        assert comm.decider is not None
        decision = comm.decider.watched()[0]
        none = dataclasses.replace(decision.options[0], codec=hc.get_codec("none"), feedback=None)
        decision.use(none, "the test says so")  # alike on all ranks
        comm.session.review_at = NEVER  # or that would be reviewed
        comm.session._choices.forget()
        comm.session.reconsider()
        x = np.zeros(N, np.float32)
        comm.Allreduce(x, out, name="w")
        verdict(float(np.abs(out - kept).max()) < 1e-4, "none sends what is owed")
        comm.Allreduce(x, out, name="w")
        verdict(not out.any(), "once")


def test_what_is_owed_is_sent_under_every_name(automatic):
    """One operation meets the change of choices; those of other names come as compiled ones."""
    comm = automatic("auto", "dp")
    names, out = ("v", "w", "x"), np.empty(N, np.float32)
    for step in range(4):
        for name in names:
            comm.Allreduce(gaussian(N, seed=step), out, name=name)
    if comm.decider is None:
        return
    kept = {
        name: WORLD.allreduce(
            comm.feedback.memory(("dp", name), N, form="ef").error.astype(np.float64), op=MPI.SUM
        )
        for name in names
    }
    verdict(all(float(np.abs(error).max()) > 1e-3 for error in kept.values()), "something is owed")
    decision = comm.decider.watched()[0]
    decision.use(dataclasses.replace(decision.options[0], codec=hc.get_codec("none"), feedback=None), "test")
    comm.session.review_at = NEVER
    comm.session._choices.forget()
    comm.session.reconsider()
    x = np.zeros(N, np.float32)
    for name in names:
        comm.Allreduce(x, out, name=name)
        verdict(float(np.abs(out - kept[name]).max()) < 1e-4, f"what {name} owes is sent")
    for name in names:
        comm.Allreduce(x, out, name=name)
        verdict(not out.any(), "once")


def test_an_exact_axis_stays_exact_to_the_bit(automatic):
    comm, plain = automatic("auto:tp=exact", "tp"), automatic("none", "tp")
    for step in range(STEPS):
        x = gaussian(N, seed=step % 5)
        mine, theirs = np.empty((2, WORLD.size, N), np.float32)
        comm.Allgather(x, mine)
        plain.Allgather(x, theirs)
        verdict(mine.tobytes() == theirs.tobytes())
    codecs = {row.codec for row in comm.stats()}
    verdict(codecs <= {"none", "exponent"}, str(codecs))


def test_operations_that_are_not_waited_for_at_once(automatic):
    comm = automatic("auto", "dp")
    for _ in range(STEPS // 6):
        outs = [np.empty(N, np.float32) for _ in range(6)]
        requests = [comm.Iallreduce(gaussian(N, seed=i), out, name=f"w{i}") for i, out in enumerate(outs)]
        for request in requests:
            request.wait()
        verdict(all(identical(out) for out in outs))
    verdict(alike(comm))


def test_small_operations_stay_on_the_fast_path(automatic):
    comm = automatic("auto", "default")
    x, out = np.ones(64, np.float32), np.empty(64, np.float32)
    for _ in range(400):
        comm.Allreduce(x, out)
    verdict(bool((out == WORLD.size).all()))
    reasons = {row.reason for row in comm.stats()}
    verdict(reasons == ({"one rank"} if WORLD.size == 1 else {"auto: below 4096 bytes"}), str(reasons))


def test_another_policy_begins_from_nothing(automatic):
    comm = automatic("auto", "dp")
    out = np.empty(N, np.float32)
    comm.Allreduce(gaussian(N), out)
    comm.policy = hc.load_policy("none")
    assert comm.decider is None
    for _ in range(20):
        comm.Allreduce(gaussian(N), out)
    comm.policy = hc.load_policy("auto:dp=exact")
    comm.Allreduce(gaussian(N), out)
    verdict(all(choice.codec in ("none", "exponent") for choice in choices(comm)))


def test_defaults_that_differ_between_hosts_are_rank_zeros(monkeypatch, tmp_path):
    monkeypatch.delenv("HYBRIDCOMP_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if WORLD.rank == 0:
        BUILT_IN.write(tmp_path / "hybridcomp" / "profile.toml")
    comm = hc.Communicator(WORLD, timeout=30.0)
    verdict(comm.policy.name == "auto", comm.policy.name)
    comm.Free()


def test_groups_decide_together():
    """Groups of one rank decide nothing, and unlike groups are refused on all ranks."""
    larger = hc.Communicator(Hosts(WORLD, range(WORLD.size)), "auto", "dp_tp", timeout=30.0)
    alone = WORLD.Split(WORLD.rank)
    comm = hc.Communicator(alone, "auto", "dp", timeout=30.0)
    comm.decide_together(larger)
    verdict(comm.deciding == WORLD.size and comm.decider is None)
    whole = hc.Communicator(Hosts(WORLD, range(WORLD.size)), "auto", "dp", timeout=30.0)
    whole.decide_together(larger)
    out = np.empty(N, np.float32)
    for step in range(STEPS):
        whole.Allreduce(gaussian(N, seed=step % 5), out, name="w")
    verdict(alike(whole) and identical(out))
    halves = hc.Communicator(WORLD.Split(WORLD.rank % 2), "auto", "dp", timeout=30.0)
    if WORLD.size > 1:
        with pytest.raises(ValueError, match=r"'dp' rank \d of the group of rank 0 is lacking"):
            whole.decide_together(comm)
    if WORLD.size % 2 and WORLD.size > 1:
        with pytest.raises(
            ValueError, match=f"that of rank 0 has {(WORLD.size + 1) // 2}, that of rank 1 has"
        ):
            halves.decide_together(larger)
    for each in (halves, whole, comm, larger):
        each.Free()
