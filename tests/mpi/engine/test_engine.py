"""The order in which operations in flight step."""

from __future__ import annotations

import time

from hybridcomp.collectives.execution.progress import engine
from hybridcomp.collectives.execution.steps import Pending, Steps
from tests.mpi.conftest import verdict


class Gate:
    open = False

    def done(self) -> bool:
        return self.open


def test_a_small_late_operation_overtakes_a_bulk_transfer():
    gate, log = Gate(), []

    def steps(name: str, count: int, seconds: float) -> Steps:
        yield Pending([], [], events=[gate])
        for _ in range(count):
            log.append(name)
            time.sleep(seconds)
            yield Pending([], [])

    bulk = engine().start(steps("bulk", 12, 1e-3), "bulk", 20.0, priority=26)
    alike = engine().start(steps("alike", 1, 0.0), "alike", 20.0, priority=26)
    late = engine().start(steps("late", 3, 0.0), "late", 20.0, priority=12)
    gate.open = True
    for request in (bulk, late, alike):
        request.wait()
    last = len(log) - log[::-1].index("late")
    verdict(last <= 4, str(log))  # one step of the bulk, if it was being looked at when the gate opened
    verdict(log[-1] == "alike", str(log))  # the older of equals goes first
