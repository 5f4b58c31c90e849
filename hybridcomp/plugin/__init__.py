"""Provide the entry point of the group ``torch.backends``, which PyTorch loads by itself.

``import torch`` calls :func:`register`. It tells torch the backend's name, and imports nothing more of hybridcomp until
a program makes a group of that name: a program that never heard of hybridcomp may be told ``--backend hybridcomp``.
Two variables go further, and change programs that name no backend of ours: ``HYBRIDCOMP_REPLACE``
(:mod:`hybridcomp.plugin.replace`) and ``HYBRIDCOMP_HOOK`` (:mod:`hybridcomp.plugin.ddp`). A third,
``HYBRIDCOMP_COMPARE`` (:mod:`hybridcomp.plugin.recording`), is set by ``hybridcomp compare`` alone.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, which is torch's own variable, switches all of it off.

The code that every ``import torch`` pays for is in this file and ``hybridcomp/imports.py``, which take a millisecond to
load.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlparse

from hybridcomp.imports import when_imported

BACKEND = "hybridcomp"
_ON_DEMAND = {  # loaded where the variable is set
    "HYBRIDCOMP_REPLACE": "replace",
    "HYBRIDCOMP_HOOK": "ddp",
    "HYBRIDCOMP_COMPARE": "recording",
}
_PATCHES = {  # by module: the function of ``hybridcomp.plugin.libraries`` that patches it
    "accelerate.state": "take_the_backend",
    "transformers.training_args": "list_the_backend",
    "ignite.distributed.comp_models.native": "offer_the_backend",
    "ignite.distributed.auto": "wrap_as_on_gloo",
    "lightning.fabric.plugins.environments.mpi": "ask_the_launcher",
    "lightning_fabric.plugins.environments.mpi": "ask_the_launcher",
}

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def register() -> None:
    """Make ``"hybridcomp"`` a backend of ``torch.distributed``, and have ``env://`` ask MPI, once."""
    import torch.distributed as dist  # noqa: PLC0415  (torch is being imported)

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers: dict[str, Handler] = importlib.import_module(
        "torch.distributed.rendezvous"
    )._rendezvous_handlers
    handlers["env"] = _before(handlers["env"])
    for name, patch in _PATCHES.items():
        when_imported(name, partial(_patch, patch))
    if any(name.startswith("HYBRIDCOMP_") for name in os.environ):
        from hybridcomp import launcher, variables  # noqa: PLC0415  (few programs have any)

        if variables.unknown():
            variables.warn_of_unknown(launcher.rank_here())
    for variable, module in _ON_DEMAND.items():
        if os.environ.get(variable):
            importlib.import_module(f"hybridcomp.plugin.{module}").install()


def _patch(function: str, module: Any) -> None:
    """Patch a module by a function of :mod:`hybridcomp.plugin.libraries`."""
    getattr(importlib.import_module("hybridcomp.plugin.libraries"), function)(module)


def _create(opts: Any, options: Any = None) -> Any:
    """Make a process group by :func:`hybridcomp.torch.backend.registration.create`."""
    from hybridcomp.torch.backend.registration import create  # noqa: PLC0415  (takes a second)

    return create(opts, options)


def _before(theirs: Handler) -> Handler:
    """Return a handler of ``env://`` that asks MPI where it knows values that the variables lack, else torch's."""

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
        query = parse_qs(urlparse(url).query)
        ranks = all(query.get(key) or os.environ.get(key.upper()) for key in ("rank", "world_size"))
        place = all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        from hybridcomp.launcher import inside_mpi  # noqa: PLC0415

        by_mpi = inside_mpi()
        # A program that names hybridcomp runs without a launcher, too: as one rank.
        if (place if ranks and by_mpi else ranks) or not (by_mpi or "hybridcomp.torch" in sys.modules):
            return theirs(url, timeout=timeout, **kwargs)
        from hybridcomp.torch.backend import rendezvous  # noqa: PLC0415

        return rendezvous.by_mpi(timeout)

    return handler
