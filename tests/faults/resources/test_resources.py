"""Ranks that run short of something end their operations with an error or the right bits, and never hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.faults.preload import library
from tests.faults.resources import memory_group
from tests.faults.resources.resources import ROOT, private_shared_memory, scenario
from tests.faults.resources.short import SPECS, plan_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a library"),
]


@pytest.mark.parametrize(
    ("seed", "kind", "early", "refused", "outcomes"),
    [
        (19, "threads", True, "threads refused", {"RuntimeError"}),
        (1170, "threads", True, "threads refused", {"right"}),
        # Which of the threads' allocations is refused depends on who comes first: the scenario knows who must be told.
        (22, "memory", True, "allocations refused", None),
        (51, "memory", False, "allocations refused", {"MemoryError", "right"}),
        (
            177,
            "memory",
            False,
            "allocations refused",
            {"MemoryError", "CollectiveTimeoutError", "right"},
        ),  # a receive
        (7, "files", True, "", {"right"}),
        (68, "address space", False, "", None),  # what fails depends on the libraries
        (5, "shared memory", False, "", {"right"}),
    ],
)
def test_all_ranks_have_an_error_or_the_right_bits(seed, kind, early, refused, outcomes):
    plan = plan_of(seed)
    assert (plan.kind, plan.early) == (kind, early)
    outcome = scenario(seed)
    assert not refused or outcome.faults[refused] > 0, outcome
    assert outcomes is None or set(outcome.outcomes) == outcomes


def test_codecs_that_are_refused_memory_say_so():
    done = subprocess.run(
        [sys.executable, "-c", "from tests.faults.resources.short import codecs_alone; codecs_alone()"],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(item for line in done.stdout.splitlines() for item in json.loads(line).items())
    assert set(found) == set(SPECS)
    assert all(ends.pop("MemoryError") for ends in found.values())
    assert set().union(*found.values()) == {"right"}, found


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_job_without_shared_memory_ends_at_its_start():
    if not private_shared_memory():
        pytest.skip("nothing may be mounted here")
    seed = next(s for s in range(1_000) if (plan := plan_of(s)).kind == "shared memory" and plan.early)
    assert set(scenario(seed).outcomes) == {"ended at the start"}


def test_a_group_without_memory_ends_the_job():
    if memory_group.parent_group() is None:
        pytest.skip("no control group can be made here")
    outcome = memory_group.scenario(1)
    assert outcome.outcomes["killed"] == 1
    assert outcome.outcomes["right"] > 0
