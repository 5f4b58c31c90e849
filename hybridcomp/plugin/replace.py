"""Make groups of this backend in programs that name another: ``HYBRIDCOMP_REPLACE=gloo``, or ``nccl``, or both.

All of torch's ways to make a group end in one of its functions, which is wrapped. A program that names no backend gets
torch's default for the machine, which is gloo without a GPU; it is replaced as if it had been named. A group answers to
the name that it replaces wherever a program may ask: libraries do for gloo and NCCL what they do for no other name.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from hybridcomp.variables import REPLACE

_MAKER = "_new_process_group_helper"  # name in torch.distributed.distributed_c10d


def install() -> None:
    """Wrap torch's maker of groups, once.

    Raises:
        ImportError: this version of torch has no function of that name.
    """
    from torch.distributed import distributed_c10d  # noqa: PLC0415  (torch is being imported)

    theirs = getattr(distributed_c10d, _MAKER, None)
    if theirs is None:
        raise ImportError(
            f"{REPLACE} cannot be used with this version of torch: unset it, and name hybridcomp"
        )

    @functools.wraps(theirs)
    def make(group_size: int, group_rank: int, ranks: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        instead = replacement(str(backend), REPLACE.read())
        if instead is None:
            return theirs(group_size, group_rank, ranks, backend, *rest, **options)
        if "hybridcomp" not in type(options.get("backend_options")).__module__:
            options["backend_options"] = None  # the options of the other backend
        _say(str(backend), distributed_c10d.get_rank() if ranks else group_rank)  # rank in the default group
        made = theirs(group_size, group_rank, ranks, instead, *rest, **options)
        if hasattr(made[0], "answer_to"):  # this rank is a member
            _rename(distributed_c10d, made[0], str(backend))
        return made

    setattr(distributed_c10d, _MAKER, make)


def _rename(c10d: Any, group: Any, backend: str) -> None:
    """Have a group, and torch's tables, say what they would say of the backend that a program names."""
    name, config = _answers(c10d, backend)
    group.answer_to(_known(c10d, config))
    world = c10d._world
    world.pg_map[group] = (name, world.pg_map[group][1])
    world.pg_backend_config[group] = str(config)


def _answers(c10d: Any, backend: str) -> tuple[Any, Any]:
    """Return what torch keeps of a backend: its name, and the backend of each device.

    A torch without NCCL asks NCCL's version wherever it finds the name, and fails: there, it is gloo's.
    """
    backend = str(c10d.Backend(backend))
    if backend == c10d.Backend.NCCL and not c10d.is_nccl_available():
        backend = c10d.Backend.GLOO
    return c10d.Backend(backend), c10d.BackendConfig(c10d.Backend(backend))


def _known(c10d: Any, config: Any) -> str:
    """Return the name that a group of torch's has: of several backends, NCCL."""
    of_devices = set(config.get_device_backend_map().values())
    nccl = c10d.Backend.NCCL in of_devices and c10d.is_nccl_available()
    return str(c10d.Backend.NCCL if nccl else c10d.Backend.GLOO)


def replacement(backend: str, replaced: frozenset[str]) -> Any:
    """Return the backend for one that a program names, or None to leave it.

    Args:
        backend: backend as torch takes it: a name, pairs such as ``cpu:gloo,cuda:nccl``, or ``undefined``, the default.
        replaced: backends to replace; for pairs, they must contain all backends for devices of this machine.
    """
    import torch  # noqa: PLC0415
    from torch.distributed import Backend  # noqa: PLC0415

    device = torch._C._get_accelerator().type
    if backend == Backend.UNDEFINED:
        named = {str(Backend.default_device_backend_map.get(device))}
    elif ":" in backend:
        pairs = dict(pair.split(":", 1) for pair in backend.lower().split(",") if ":" in pair)
        named = {name for kind, name in pairs.items() if kind in ("cpu", device)}
    else:
        named = {backend.lower()}
    return Backend("hybridcomp") if named and named <= replaced else None


_said = False


def _say(backend: str, rank: int) -> None:
    """Print once, on rank 0, which backend is replaced."""
    global _said  # noqa: PLW0603
    if not _said and rank == 0:
        _said = True
        name = "torch's default backend" if backend == "undefined" else backend
        from hybridcomp.style import say  # noqa: PLC0415  (importing torch is not to wait for it)

        say(
            f"hybridcomp: makes the groups of {name} ({REPLACE}={','.join(sorted(REPLACE.read()))})",
            sys.stderr,
        )
