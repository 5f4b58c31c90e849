"""Cut data into regions whose owners depend on the sizes of their messages, and resolve schedules with such owners.

All ranks find the same owners, as all know the sizes of all ranks' messages. A schedule has steps for each possible
owner; :func:`resolved` leaves out the steps of other owners, so that the rest can be proved, timed and drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridcomp.schedules.faults import ScheduleError, fail
from hybridcomp.schedules.schedule import Kind, Schedule, Step
from hybridcomp.schedules.shards import Shards

_REGIONS = 8  # least regions for each rank, where the data are large enough
_LEAST_BYTES = 1 << 12  # uncompressed bytes of a region
_RANDOM = 2  # random cuts for which schedules are proved


def regions(n: int, ranks: int, itemsize: int, chunk_bytes: int) -> Shards:
    """Cut ``n`` elements into regions, the chunks of one shard."""
    region = min(chunk_bytes, max(_LEAST_BYTES, n * itemsize // (_REGIONS * ranks)))
    return Shards.fixed(n, 1, n, itemsize, region)


def balanced(weights: Sequence[int], ranks: int) -> list[list[int]]:
    """Cut regions into one run for each rank, of about equal weight: a region goes where its middle falls.

    The engine does the same (``kernels/engine/cut.cpp``).

    Args:
        weights: weights of the regions, above 0.
        ranks: number of runs; some may be empty.
    """
    runs: list[list[int]] = [[] for _ in range(ranks)]
    total, before = sum(weights), 0
    for region, weight in enumerate(weights):
        runs[(2 * before + weight) * ranks // (2 * total)].append(region)
        before += weight
    return runs


def owners(weights: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each region as :func:`balanced` cuts them."""
    return [rank for rank, run in enumerate(balanced(weights, ranks)) for _ in run]


def even(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Return the steps of all ranks' schedules carried out where all regions weigh the same; without a cut, all steps.

    Raises:
        ScheduleError: the schedules do not fit together.
    """
    return resolved(schedules, owners([1] * _regions(schedules), len(schedules)))


def cases(schedules: Sequence[Schedule]) -> Iterable[list[Schedule]]:
    """Yield the steps of all ranks' schedules that are carried out, for each of several cuts.

    Each rank owns all regions in one of the cuts, so that every step is carried out in some case. Without a cut, there
    is one case: the schedules themselves.

    Raises:
        ScheduleError: the schedules do not fit together, or a step cannot know whether it is to be carried out.
    """
    count, ranks = _regions(schedules), len(schedules)
    for schedule in schedules:
        _check_conditions(schedule, count)
    if not count:
        yield list(schedules)
        return
    yield even(schedules)
    for rank in range(ranks):
        yield resolved(schedules, [rank] * count)
    draw = random.Random(count * ranks)
    for _ in range(_RANDOM if ranks > 1 else 0):
        yield resolved(schedules, [draw.randrange(ranks) for _ in range(count)])


def resolved(schedules: Sequence[Schedule], owners: Sequence[int]) -> list[Schedule]:
    """Remove the steps of regions' other owners; a step that waits for a removed step waits for that step's list."""
    return [_resolved(schedule, owners) for schedule in schedules]


def _resolved(schedule: Schedule, owners: Sequence[int]) -> Schedule:
    kept: list[Step] = []
    ended: list[set[int]] = []  # for each step, the kept steps whose end is its end
    for index, step in enumerate(schedule.steps):
        if any(not 0 <= one < index for one in step.after):
            fail(schedule, index, f"it waits for step {max(step.after)}, which is not an earlier one")
        after = {other for one in step.after for other in ended[one]}
        if step.region >= 0 and owners[step.region] != step.owner:
            ended.append(after)
            continue
        ended.append({len(kept)})
        kept.append(replace(step, after=tuple(sorted(after))))
    return replace(schedule, steps=tuple(kept))


def _regions(schedules: Sequence[Schedule]) -> int:
    """Return the number of regions that all ranks cut."""
    counts = [schedule.regions for schedule in schedules]
    if min(counts) != max(counts):
        raise ScheduleError(f"the ranks cut different numbers of regions: {counts}")
    return counts[0]


def _check_conditions(schedule: Schedule, count: int) -> None:
    """Check that steps name existing owners, and that all messages of a channel, or none, depend on the cut."""
    asks: dict[tuple[Kind, int, int], bool] = {}
    cuts = 0
    for index, step in enumerate(schedule.steps):
        cuts += step.kind is Kind.CUT
        if (step.region >= 0) != (step.owner >= 0) or step.region >= count or step.owner >= schedule.ranks:
            fail(schedule, index, f"there is no region {step.region}, or no owner {step.owner}")
        if cuts > 1 or (step.kind is Kind.CUT and step.region >= 0):
            fail(schedule, index, "owners are found once")
        if step.kind in (Kind.SEND, Kind.RECV):
            line = step.kind, step.peer, step.channel
            if asks.setdefault(line, step.region >= 0) != (step.region >= 0):
                fail(schedule, index, "some messages of its channel depend on the cut, and others do not")
