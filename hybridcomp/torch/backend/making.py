"""Make the communicator of a process group, out of the MPI ranks that torch names."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from hybridcomp.errors import CollectiveTimeoutError, ConfigError, MismatchError, RemoteError
from hybridcomp.launcher import abort, keep_to_loopback
from hybridcomp.pmi import ending
from hybridcomp.policy import load_policy
from hybridcomp.torch.backend.options import GroupInit, default_policy

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

# Between looks at who has come a member sleeps for a share of the time for which it has waited, within limits.
_LOOK_SHARE, _LEAST_LOOK, _MOST_LOOK = 1 / 16, 100e-6, 0.1
_users: set[int] = set()  # ids of the processes that make groups
_failures: Counter[str] = (
    Counter()
)  # of the groups that could not be made, by name: the same on all their ranks


def make_communicator(init: GroupInit, name: str, timeout: timedelta) -> Communicator:
    """Make the communicator of a process group. Collective over the group's ranks.

    Args:
        init: ranks of the group, the store where they meet, and the caller's options.
        name: torch's name of the group, for error messages.
        timeout: timeout of the group, and of the wait for its ranks.

    Raises:
        ConfigError, PolicyError, MismatchError, CollectiveTimeoutError, RemoteError: as for
            :func:`.registration.create`.
    """
    _check_process(name)
    with telling(init, name):
        return _make(init, name, timeout)


@contextmanager
def telling(init: GroupInit, name: str) -> Iterator[None]:
    """Tell the other members of a group, in torch's store, of an error on this rank alone; they would wait for it."""
    key = _failed(name)
    try:
        yield
    except BaseException as error:
        _failures[name] += 1
        if not isinstance(error, MismatchError | RemoteError | CollectiveTimeoutError):
            with suppress(dist.DistError):  # the store may have ended with its rank
                init.store.set(key, f"{init.rank} failed: {type(error).__name__}: {error}")
        raise


def check_members(init: GroupInit, name: str) -> None:
    """Raise RemoteError if a member has told that it cannot make the group."""
    key = _failed(name)
    if init.store.check([key]):
        raise RemoteError(
            f"making process group {name!r}: rank {init.store.get(key).decode(errors='replace')}"
        )


def _failed(name: str) -> str:
    """Return the key that says who has failed, not that of an earlier attempt: a store may outlive processes."""
    return f"hybridcomp/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}.{_failures[name]}"


def _make(init: GroupInit, name: str, timeout: timedelta) -> Communicator:
    options = init.options
    policy = default_policy() if options.policy is None else load_policy(options.policy)

    keep_to_loopback()
    # Here, and not above: a hook on gloo or NCCL needs no MPI.
    from mpi4py import MPI  # noqa: PLC0415

    from hybridcomp.collectives import Communicator  # noqa: PLC0415
    from hybridcomp.collectives.agreement.making import Founding  # noqa: PLC0415

    world = MPI.COMM_WORLD
    _check_world(world, init)
    _abort_on_exception(world)
    seconds = timeout.total_seconds()

    def create() -> Any:
        group = world.Get_group()
        members = group.Incl(init.ranks)
        made = world.Create_group(members)
        members.Free()
        group.Free()
        return made

    founding = Founding(init.rank, init.ranks, lambda: _wait_for_members(init, name, timeout), create)
    detail = True if get_debug_level() == DebugLevel.DETAIL else None
    return Communicator(founding, policy, options.axis or "default", timeout=seconds, detail=detail)


def _check_process(name: str) -> None:
    _users.add(os.getpid())  # a fork has its parent's, too
    if len(_users) > 1:
        raise ConfigError(
            f"making process group {name!r}: this process was forked after another group had been made, and MPI "
            f"cannot be used here; fork first, or start processes by spawn"
        )


def _check_world(world: Any, init: GroupInit) -> None:
    ranks, rank = init.ranks, init.rank
    if max(ranks) >= world.size or ranks[rank] != world.rank:
        n = max(len(ranks), max(ranks) + 1)
        raise ConfigError(
            f"torch says that this is rank {ranks[rank]} of {n}, MPI says rank {world.rank} of {world.size}: make a "
            f"group of all ranks before anything else starts MPI (from mpi4py import MPI), or start the program with "
            f"MPI (mpiexec -n {n} python ..., or srun)"
        )


def _wait_for_members(init: GroupInit, name: str, timeout: timedelta) -> None:
    """Wait for all members in torch's store: unlike MPI's calls that make a group, this wait has an end."""
    store, size = init.store, len(init.ranks)
    store.set(f"hybridcomp/{init.rank}", "1")
    keys = [f"hybridcomp/{rank}" for rank in range(size)]
    began = time.monotonic()
    while not store.check(keys):
        check_members(init, name)
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise CollectiveTimeoutError(
                f"making process group {name!r}: after {timeout.total_seconds():g} s rank {', '.join(missing)} of "
                f"{size} has not come"
            )
        time.sleep(min(max(waited * _LOOK_SHARE, _LEAST_LOOK), _MOST_LOOK))


def _abort_on_exception(world: Any) -> None:
    """End all ranks when one ends by an exception where MPI would wait for them at its exit."""
    if ending.hold() or world.size == 1 or getattr(sys.excepthook, "hybridcomp", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # torch's own hook, which calls this one, has put a buffer in the place of stderr.
        sys.stderr = sys.__stderr__ or sys.stderr
        before(kind, value, trace)
        abort(world, 1)

    hook.hybridcomp = True  # type: ignore[attr-defined]
    sys.excepthook = hook
