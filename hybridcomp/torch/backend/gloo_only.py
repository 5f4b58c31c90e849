"""Let torch functions that take only groups of its own backends take ours.

``torch.distributed.monitored_barrier`` refuses any backend that is not called gloo, ``_set_pg_timeout`` ignores it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def install() -> None:
    """Patch both functions, once, so that they take groups of ours; on others they do as ever."""
    _replace("monitored_barrier", _monitored_barrier)
    _replace("_set_pg_timeout", _set_pg_timeout)


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    theirs = getattr(distributed_c10d, name, None)
    if theirs is None or getattr(theirs, "hybridcomp", False):
        return
    ours = functools.wraps(theirs)(wrap(theirs))
    ours.hybridcomp = True  # type: ignore[attr-defined]
    for module in (distributed_c10d, dist):
        if getattr(module, name, None) is theirs:
            setattr(module, name, ours)


def _monitored_barrier(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def monitored_barrier(
        group: Any = dist.GroupMember.WORLD,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        own = _own(group)
        if own is None:
            return theirs(group, timeout, wait_all_ranks)
        seconds = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        return own.monitored_barrier(seconds, wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        own = _own(group)
        if own is None:
            theirs(timeout, group)
        else:
            own.set_timeout(timeout)

    return set_pg_timeout


def _own(group: Any) -> Any:
    """Return the group, or the default one, if it is a group of this backend; else None."""
    group = dist.group.WORLD if group is None else group
    return group if hasattr(group, "comm") and hasattr(group, "monitored_barrier") else None
