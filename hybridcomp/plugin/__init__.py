"""Provide the entry point of the group ``torch.backends``, which PyTorch loads by itself.

``import torch`` calls :func:`register`. It tells torch the backend's name, and imports nothing more of hybridcomp until
a program makes a group of that name: a program that never heard of hybridcomp may be told ``--backend hybridcomp``.
Two variables go further, and change programs that name no backend of ours: ``HYBRIDCOMP_REPLACE``
(:mod:`hybridcomp.plugin.replace`) and ``HYBRIDCOMP_HOOK`` (:mod:`hybridcomp.plugin.ddp`). A third,
``HYBRIDCOMP_COMPARE`` (:mod:`hybridcomp.plugin.recording`), is set by ``hybridcomp compare`` alone.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, which is torch's own variable, switches all of it off.

The code that every ``import torch`` pays for is in this one file, which takes a millisecond to load.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs, urlparse

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
        variables = importlib.import_module("hybridcomp.variables")
        if variables.unknown():
            variables.warn_of_unknown(importlib.import_module("hybridcomp.launcher").rank_here())
    for variable, module in _ON_DEMAND.items():
        if os.environ.get(variable):
            importlib.import_module(f"hybridcomp.plugin.{module}").install()


def when_imported(name: str, do: Callable[[Any], None]) -> None:
    """Call ``do(module)`` after a module has been executed, or now if it has been.

    Modules of other libraries are patched so: some take a second to import, and few programs need them.
    """
    module = sys.modules.get(name)
    if module is None:
        _finder.wanted.setdefault(name, []).append(do)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    else:
        do(module)


class _Finder(MetaPathFinder):
    """Finder of imports that finds the wanted modules as other finders would, each once."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module as :class:`importlib.abc.MetaPathFinder` describes."""
        if fullname not in self.wanted:
            return None
        calls = self.wanted.pop(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_do(module: Any) -> None:
                execute(module)
                for do in calls:
                    do(module)

            spec.loader.exec_module = execute_and_do  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _patch(function: str, module: Any) -> None:
    """Patch a module by a function of :mod:`hybridcomp.plugin.libraries`."""
    getattr(importlib.import_module("hybridcomp.plugin.libraries"), function)(module)


def _create(opts: Any, options: Any = None) -> Any:
    """Make a process group by :func:`hybridcomp.torch.backend.registration.create`."""
    importlib.import_module("hybridcomp.torch")
    return importlib.import_module("hybridcomp.torch.backend.registration").create(opts, options)


def _before(theirs: Handler) -> Handler:
    """Return a handler of ``env://`` that asks MPI where it knows values that the variables lack, else torch's."""

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
        query = parse_qs(urlparse(url).query)
        ranks = all(query.get(key) or os.environ.get(key.upper()) for key in ("rank", "world_size"))
        place = all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        by_mpi = importlib.import_module("hybridcomp.launcher").inside_mpi()
        # A program that names hybridcomp runs without a launcher, too: as one rank.
        if (place if ranks and by_mpi else ranks) or not (by_mpi or "hybridcomp.torch" in sys.modules):
            return theirs(url, timeout=timeout, **kwargs)
        return importlib.import_module("hybridcomp.torch.backend.rendezvous").by_mpi(timeout)  # type: ignore[no-any-return]

    return handler
