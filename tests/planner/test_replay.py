"""Check how ranks share processors in the replay of a step."""

from __future__ import annotations

import pytest

from hybridcomp_lab.planner.step.programs import Compute, Program, Start, Wait
from hybridcomp_lab.planner.step.replay import Replay, unsynchronised
from hybridcomp_lab.planner.step.traffic import Cost


@pytest.mark.parametrize(
    ("cores", "speeds", "ends"),
    [
        (None, (1.0, 0.25), (1.0, 4.0)),
        (2.0, (1.0, 0.25), (1.0, 4.0)),
        (1.0, (1.0, 0.25), (1 / 0.75, 4.0)),
        (0.4, (1.0, 0.25), (5.0, 5.0)),
        (1.0, (1.0, 1.0), (2.0, 2.0)),
    ],
)
def test_a_slow_host_leaves_the_cores_that_it_may_not_use_to_others(cores, speeds, ends):
    programs = [Program(rank, 1, speed, [Compute("work", 1.0)]) for rank, speed in enumerate(speeds)]
    replayed = Replay(programs, cores).run()
    assert [span.end for span in sorted(replayed.spans, key=lambda span: span.rank)] == pytest.approx(ends)
    bound = max(*(1 / speed for speed in speeds), 0 if cores is None else 2 / cores)
    assert unsynchronised(programs, cores, 1) == pytest.approx(bound)


def test_messages_of_a_slow_host_wait_for_its_part_of_a_core_too():
    cost = Cost(cpu=1.0, latency=0.5, link=2.0, wire=0.0, receive=1.0)
    programs = [
        Program(0, 1, 0.5, [Start(("x",), "pp", cost, to=1)]),
        Program(1, 1, 0.25, [Wait(("x",))]),
    ]
    for cores, end in ((None, 1 + 0.5 + 2 + 1), (2.0, 2 + 0.5 + 2 + 4)):
        (span,) = Replay(programs, cores).run().spans
        assert span.end == pytest.approx(end)


def test_senders_of_a_host_share_its_link():
    """Program 0 stands for two ranks of one host, each of which sends to a rank of another host."""
    cost = Cost(cpu=0.0, latency=0.5, link=2.0, wire=0.0, receive=0.0)
    programs = [
        Program(0, 2, 1.0, [Start(("x",), "pp", cost, to=1)], {"pp to 1": {0: 2}}),
        Program(2, 2, 1.0, [Wait(("x",))]),
    ]
    (span,) = Replay(programs, None).run().spans
    assert (span.stream, span.end) == ("pp", pytest.approx(0.5 + 2 * 2.0))
    assert unsynchronised(programs, None, 1) == pytest.approx(0.5 + 2 * 2.0)
