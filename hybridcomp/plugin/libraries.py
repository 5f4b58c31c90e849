"""Make libraries that know torch's backends by name take this one: accelerate, and transformers' ``Trainer``.

On CPUs accelerate insists on gloo whatever a program asks for, and transformers' command line has a list of names.
"""

from __future__ import annotations

import functools
from typing import Any

from hybridcomp.plugin.on_import import when_imported

_NAME = "hybridcomp"


def install() -> None:
    """Patch them when a program imports them. Where a version has none of these names, nothing changes."""
    when_imported("accelerate.state", _take_the_backend)
    when_imported("transformers.training_args", _list_the_backend)


def _take_the_backend(module: Any) -> None:
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


def _list_the_backend(module: Any) -> None:
    """Add the backend to the choices of ``--ddp_backend``."""
    arguments = getattr(module, "TrainingArguments", None)
    field = getattr(arguments, "__dataclass_fields__", {}).get("ddp_backend")
    choices = field.metadata.get("choices") if field is not None else None
    if isinstance(choices, list) and _NAME not in choices:
        choices.append(_NAME)
