"""Compute with sets of times: sorted lists of intervals that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = list[Interval]


def union(given: Iterable[Interval]) -> Intervals:
    """Return the times that are in any of some intervals, which may overlap."""
    result: Intervals = []
    for began, ended in sorted(given):
        if ended <= began:
            continue
        if result and began <= result[-1][1]:
            if ended > result[-1][1]:
                result[-1] = (result[-1][0], ended)
        else:
            result.append((began, ended))
    return result


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """Return the times that are in both sets."""
    result: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        began, ended = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if began < ended:
            result.append((began, ended))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """Return the times of the first set that are not in the second."""
    result: Intervals = []
    j = 0
    for began, ended in a:
        at = began
        while j < len(b) and b[j][1] <= at:
            j += 1
        k = j
        while k < len(b) and b[k][0] < ended:
            if b[k][0] > at:
                result.append((at, b[k][0]))
            at = max(at, b[k][1])
            k += 1
        if at < ended:
            result.append((at, ended))
    return result


def length(given: Iterable[Interval]) -> float:
    """Return the seconds of a set."""
    return sum(ended - began for began, ended in given)
