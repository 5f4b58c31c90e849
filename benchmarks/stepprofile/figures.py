"""Reduce the records of ranks and cores to milliseconds of a step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .parts import MAIN_THREAD, PROCESSOR
from .records import RankRecord

MOST = 12  # places of each kind that are kept


def of_plain_steps(records: Sequence[RankRecord], steps: int, tokens: float) -> dict[str, Any]:
    """Return the time of the steps without a sampler, in milliseconds, and the speed at ``tokens`` a step.

    ``plain_core_ms`` is the processor time of all ranks together.
    """
    seconds = statistics.fmean(one.plain_seconds for one in records) / steps
    core = sum(one.plain_core for one in records) / steps
    return {
        "plain_step_ms": round(seconds * 1e3, 3),
        "plain_core_ms": round(core * 1e3, 3),
        "tokens_per_s": round(tokens / seconds, 1),
    }


def of_main_threads(records: Sequence[RankRecord], steps: int) -> dict[str, Any]:
    """Return the main threads' time a step by part, in milliseconds: the mean over the ranks."""
    per_step = 1e3 / steps / len(records)
    parts = {
        part: {
            key: round(sum(one.parts.get(part, {}).get(key, 0.0) for one in records) * per_step, 3)
            for key in ("wall", "core", "ready")
        }
        for part in MAIN_THREAD
    }
    places: dict[tuple[str, str], float] = defaultdict(float)
    for one in records:
        for part, place, seconds in one.places:
            places[part, place] += seconds
    return {
        "step_ms": round(statistics.fmean(one.seconds for one in records) * 1e3 / steps, 3),
        "core_ms": round(
            sum(times["core"] for times in parts.values()) * len(records)
            + sum(one.other_threads for one in records) * 1e3 / steps,
            3,
        ),
        "main_thread": parts,
        "other_threads": round(sum(one.other_threads for one in records) * per_step, 3),
        "samples": sum(one.samples for one in records),
        "main_thread_places": most(places, per_step),
    }


def of_cores(
    parts: Mapping[str, float], places: Mapping[tuple[str, str], float], core_seconds: float, steps: float
) -> dict[str, Any]:
    """Return the cores' time a step by part, in milliseconds of all of them together.

    Args:
        parts: seconds by part, as perf sampled them.
        places: the same by part and function.
        core_seconds: seconds of all cores together in that time. Samples that perf lost are shared out among all parts.
        steps: steps in that time.
    """
    sampled = sum(parts.values())
    if not sampled:
        raise ValueError("perf recorded nothing in the time of the sampled steps")
    per_step = core_seconds / sampled * 1e3 / steps
    return {
        "processor": {part: round(parts.get(part, 0.0) * per_step, 3) for part in PROCESSOR},
        "perf_sampled": round(sampled / core_seconds, 4),
        "processor_places": most(places, per_step),
    }


def most(places: Mapping[tuple[str, str], float], scale: float) -> list[list[Any]]:
    """Return the places that took most, as part, place and milliseconds."""
    order = sorted(places.items(), key=lambda item: -item[1])[:MOST]
    return [[part, place, round(seconds * scale, 3)] for (part, place), seconds in order]
