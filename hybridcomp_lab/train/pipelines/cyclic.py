"""Define the time-steps of cyclic data parallelism: each worker's pass, and the activations that are alive.

After Fournier and Oyallon 2024, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks" (arXiv
2403.08837). N workers train N stages on N micro-batches. A step takes each worker 2N time-steps, a stage in each:
forward through stages 1 to N, then backward through N to 1. In data parallelism all workers do the same at the same
time; in cyclic data parallelism each is two time-steps behind the one before. Workers and stages count from 1 here, as
in the paper.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LAG = 2
"""Time-steps between a worker and the next."""


class Pass(NamedTuple):
    """Pass that a worker does in a time-step."""

    direction: Literal["forward", "backward"]
    stage: int


def passes(stages: int) -> list[Pass]:
    """Return the passes of a worker's step, 2 * stages of them, in order."""
    there: list[Pass] = [Pass("forward", stage) for stage in range(1, stages + 1)]
    return [*there, *(Pass("backward", stage) for stage in range(stages, 0, -1))]


def is_fresh(worker: int, stage: int, stages: int) -> bool:
    """Tell whether the update of the step before is done when ``worker`` comes to ``stage``: the rule of CDP-v2.

    Worker i reaches forward stage j at T + 2(i - 1) + (j - 1), where T begins the step; worker N of the step
    before ends backward of stage j at T + 2N - 1 - j. So i + j > N.
    """
    return worker + stage > stages


def totals_due(worker: int, stages: int, *, at_once: bool) -> list[list[int]]:
    """Return which stages' totals of a step a worker takes and passes on, before each pass of that step and the next.

    By the times of :func:`is_fresh`, the total of stage j is made 4N - 1 - j time-steps after worker 1 begins the
    step, and worker i is 2(i - 1) time-steps behind worker 1.

    Args:
        worker: number of the worker; the last one makes the totals, and takes none.
        stages: number of stages of the model.
        at_once: whether totals are taken as they are made, as CDP-v2 needs. With CDP-v1 they can travel with the wave
            of the workers, two time-steps for each, and each comes before its step needs it: links get an evener load.
    """
    due: list[list[int]] = [[] for _ in [*passes(stages), *passes(stages)]]
    if worker < stages:
        behind = LAG * (worker - 1) if at_once else 0
        for stage in range(stages, 0, -1):
            due[4 * stages - 1 - stage - behind].append(stage)
    return due


def sent(workers: int, *, at_once: bool) -> list[int]:
    """Count the messages that all workers together send, in each time-step of a step: partial sums, and totals.

    Args:
        workers: number N of workers, as many as stages.
        at_once: see :func:`totals_due`.

    Returns:
        2N counts, of time-steps in which every worker is at work; N - 1 is their mean.
    """
    counts = [0] * (2 * workers)
    for worker in range(1, workers):
        start = LAG * (worker - 1)
        for index, which in enumerate(passes(workers)):
            if which.direction == "backward":  # its partial sum leaves when it ends
                counts[(start + index + 1) % len(counts)] += 1
        for index, stages in enumerate(totals_due(worker, workers, at_once=at_once)):
            counts[(start + index) % len(counts)] += len(stages)  # totals from the worker before
    return counts


def owner(stage: int, stages: int) -> int:
    """Return the worker that updates a stage that workers share: the first that sees its fresh weights in CDP-v2.

    The function is its own inverse: worker i has stage ``owner(i, stages)``.
    """
    return stages - stage + 1


def weights_from(worker: int, stage: int, stages: int, *, by_stage: bool) -> int:
    """Return the worker that hands a worker a stage's weights, where workers share stages; itself if they are its own.

    A version's way begins with the stage's owner and goes up through the workers.

    Args:
        worker, stage, stages: worker, stage and number of stages, from 1.
        by_stage: whether it is CDP-v2, whose fresh weights set out where they are made, in the middle of the workers.
    """
    first = worker == 1 or (by_stage and worker == owner(stage, stages))
    return owner(stage, stages) if first else worker - 1


class Duties(NamedTuple):
    """Duties of a stage's owner: the passes before which it does them; passes count from 0 in its step.

    Attributes:
        back: pass before which it hands out this step's weights for backward, then takes the total of the step before.
        on: pass before which it hands out the next step's weights for forward; at ``stages * 2`` and above, in that
            step. Weights that need a norm over all stages are made no earlier.
    """

    back: int
    on: int


def duties(stage: int, stages: int) -> Duties:
    """Return the duties of the stage's owner: each a time-step before worker 1 needs it.

    Worker 1 comes to forward of stage j at T + j - 1 and to backward at T + 2N - j, T being when it begins its step;
    the owner, N - j + 1, begins at T + 2(N - j). The total of stage j of the step before is made at T + 2N - 1 - j.
    """
    return Duties(stage - 1, 3 * stage - 2)


def handed(workers: int, *, by_stage: bool) -> list[int]:
    """Count the messages that all workers together send, in each time-step of a step, where they share the stages.

    Args:
        workers: number N of workers, as many as stages.
        by_stage: whether it is CDP-v2.

    Returns:
        2N counts, of time-steps in which every worker is at work: weights, sums and totals, each of a stage.
    """
    counts = [0] * (2 * workers)

    def count(time: int) -> None:
        counts[time % len(counts)] += 1

    for worker in range(1, workers + 1):
        start, own = LAG * (worker - 1), owner(worker, workers)
        for index, (direction, stage) in enumerate(passes(workers)):
            if direction == "backward" and not (worker == workers and stage == own):
                count(start + index + 1)  # the sum, when the pass ends
            # The last stage's weights stay for the pass that follows, and all others' go on at once.
            goes_on = (
                worker < workers and weights_from(worker + 1, stage, workers, by_stage=by_stage) == worker
            )
            if goes_on and (direction == "backward" or stage < workers):
                count(start + index + 1)
        if worker > 1:  # the owner hands out to worker 1
            for duty in duties(own, workers):
                count(start + duty)
    return counts


def alive(workers: int, *, cyclic: bool) -> list[int]:
    """Count the stage-activations that all workers together hold, in each time-step of a step.

    An activation of one stage and micro-batch is held from its forward pass to its backward pass, both included.

    Args:
        workers: number N of workers, as many as stages.
        cyclic: whether workers are two time-steps apart, or all at the same time.

    Returns:
        2N counts, of time-steps in which every worker is at work. Data parallelism: at most N * N. Cyclic:
        N * (N + 1) / 2, always.
    """
    held = []
    count = 0
    for done in passes(workers):
        count += done.direction == "forward"
        held.append(count)
        count -= done.direction == "backward"
    lag = LAG if cyclic else 0
    return [sum(held[(t - lag * i) % len(held)] for i in range(workers)) for t in range(len(held))]
