"""Let torch functions that take only groups of its own backends take ours.

``torch.distributed.monitored_barrier`` refuses any backend that is not called gloo, ``_set_pg_timeout`` ignores it.
DDP's built-in hook that compresses to 16 bits reads the result of an all-reduce in C++, in a form that no process
group in Python can give it. The count of ``Join`` is handed to compiled code, which keeps no object of Python alive,
and waits for ever without it. A group that is made while the default one is bound to a device is split from that one's
backend, which from torch 2.14 on must be none in Python; ours needs no splitting.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def install() -> None:
    """Patch these functions, once, so that they take groups of ours; on others they do as ever."""
    _replace("monitored_barrier", _monitored_barrier, distributed_c10d, dist)
    _replace("_set_pg_timeout", _set_pg_timeout, distributed_c10d, dist)
    _replace("_get_split_source", _get_split_source, distributed_c10d)
    _replace("_register_builtin_comm_hook", _register_builtin_comm_hook, DistributedDataParallel)
    theirs = Join.notify_join_context
    if not getattr(theirs, "hybridcomp", False):
        Join.notify_join_context = staticmethod(_notify_join_context(theirs))  # type: ignore[assignment]


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *owners: Any) -> None:
    """Replace a function of the first owner by a wrapped one, there and where others have the same."""
    theirs = getattr(owners[0], name, None)
    if theirs is None or getattr(theirs, "hybridcomp", False):
        return
    ours = functools.wraps(theirs)(wrap(theirs))
    ours.hybridcomp = True  # type: ignore[attr-defined]
    for owner in owners:
        if getattr(owner, name, None) is theirs:
            setattr(owner, name, ours)


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


def _register_builtin_comm_hook(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def register(self: Any, comm_hook_type: Any) -> None:
        compresses = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
        if not compresses or _own(self.process_group) is None:
            theirs(self, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415  (few need it)

        self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    return register


def _get_split_source(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_split_source(pg: Any) -> Any:
        return None if _own(pg) is not None else theirs(pg)

    return get_split_source


_counts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the newest of each module


def _notify_join_context(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def notify_join_context(joinable: Any) -> Any:
        work = theirs(joinable)
        if work is not None:
            _counts[joinable] = work
        return work

    notify_join_context.hybridcomp = True  # type: ignore[attr-defined]
    return notify_join_context


def _own(group: Any) -> Any:
    """Return the group, or the default one, if it is a group of this backend; else None."""
    group = dist.group.WORLD if group is None else group
    return group if hasattr(group, "comm") and hasattr(group, "monitored_barrier") else None
