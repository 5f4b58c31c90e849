"""Make libraries take this backend: accelerate, transformers' ``Trainer``, Lightning, and Ignite.

On CPUs accelerate insists on gloo whatever a program asks for, and transformers' command line has a list of names.
Ignite has one, too, and on a backend whose name it does not know its ``auto_model`` wraps no model in DDP: each rank
would train by itself.
Lightning starts MPI to ask whether it was started by MPI, and MPI starts but once.

:mod:`hybridcomp.plugin` calls these functions when a program imports the libraries. Where a version has none of the
names that they patch, nothing changes.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_NAME = "hybridcomp"


def take_the_backend(module: Any) -> None:
    """Have accelerate take the backend by name on CPUs, as it does on GPUs."""
    state = getattr(module, "PartialState", None)
    theirs = getattr(state, "_prepare_backend", None)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def prepare(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None) -> Any:
        found, kind = theirs(self, cpu, sagemaker_dp, backend)
        return (backend if backend == _NAME and found == "gloo" else found), kind

    state._prepare_backend = prepare  # type: ignore[union-attr]


def list_the_backend(module: Any) -> None:
    """Add the backend to the choices of ``--ddp_backend``."""
    arguments = getattr(module, "TrainingArguments", None)
    field = getattr(arguments, "__dataclass_fields__", {}).get("ddp_backend")
    choices = field.metadata.get("choices") if field is not None else None
    if isinstance(choices, list) and _NAME not in choices:
        choices.append(_NAME)


def offer_the_backend(module: Any) -> None:
    """Add the backend to those that Ignite can be initialised with."""
    model = getattr(module, "_NativeDistModel", None)
    names = getattr(model, "available_backends", None)
    if isinstance(names, tuple) and _NAME not in names:
        model.available_backends = (*names, _NAME)  # type: ignore[union-attr]


def wrap_as_on_gloo(module: Any) -> None:
    """Have Ignite's ``auto_model`` and its kin, which compare names, do on the backend what they do on gloo."""
    theirs = getattr(module, "idist", None)
    if hasattr(theirs, "backend") and not isinstance(theirs, _AsOnGloo):
        module.idist = _AsOnGloo(theirs)


class _AsOnGloo:
    """Ignite's module of the distributed state, which takes the backend for gloo."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def backend(self) -> Any:
        """Return the name of the backend; gloo's for this one."""
        name = self._theirs.backend()
        return "gloo" if name == _NAME else name


def ask_the_launcher(module: Any) -> None:
    """Have Lightning start no MPI where no MPI launcher started this process, so that there is one rank."""
    environment = getattr(module, "MPIEnvironment", None)
    theirs = getattr(environment, "detect", None)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def detect() -> bool:
        return bool(importlib.import_module("hybridcomp.launcher").inside_mpi() and theirs())

    environment.detect = staticmethod(detect)  # type: ignore[union-attr]
