"""Tell whether a message belongs to the forward or to the backward pass.

A collective that starts in a thread that runs autograd's backward pass is backward. Sends of a pipeline start outside
of it, whatever they carry, and their direction says nothing where a rank has several stages. So the stages of
``torch.distributed.pipelining`` tell it themselves: they make sends of activations and sends of gradients in two
methods, which are wrapped here. A program with a pipeline of its own tells it by :func:`in_phase`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hybridcomp.imports import when_imported
from hybridcomp.policy import PHASES, Place, place

_METHODS = {"get_fwd_send_ops": "forward", "get_bwd_send_ops": "backward"}

_task = torch._C._current_graph_task_id  # id of autograd's backward pass in this thread; -1 outside
_said = threading.local()
_sent: Any = WeakIdKeyDictionary()  # phases and places of tensors that are about to be sent


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Set the pass of all messages that this thread sends inside, for policies that tell passes apart.

    Args:
        name: ``"forward"`` or ``"backward"``.

    Raises:
        ValueError: any other name.
    """
    if name not in PHASES:
        raise ValueError(f"a phase is {' or '.join(map(repr, PHASES))}, not {name!r}")
    before = getattr(_said, "phase", None)
    _said.phase = name
    try:
        yield
    finally:
        _said.phase = before


def phase() -> str:
    """Return the phase of :func:`in_phase`; else ``"backward"`` in a thread that runs autograd's backward pass.

    Activation checkpointing runs forward passes within the backward pass, whose messages must be what they were: those
    are ``"forward"``. They are known by the hooks that it has for saved tensors meanwhile.
    """
    said: str | None = getattr(_said, "phase", None)
    if said is not None:
        return said
    return "forward" if _task() == -1 or _recomputes() else "backward"


def in_backward() -> bool:
    """Tell whether this thread runs autograd's backward pass, or a forward pass within it."""
    return bool(_task() != -1)


def _recomputes() -> bool:
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(True) is not None


def about_send(tensor: torch.Tensor, *, up: bool) -> tuple[str, Place]:
    """Return phase and place of a point-to-point message, as set when it was made or else as they are now.

    Args:
        tensor: tensor as the program sends it.
        up: whether it goes to a higher rank: a message whose phase nothing has set is taken for one of a pipeline with
            one stage a rank, where activations go up and gradients down.
    """
    found: tuple[str, Place] | None = _sent.pop(tensor, None)
    if found is not None:
        return found
    said: str | None = getattr(_said, "phase", None)
    return said or ("forward" if up and not in_backward() else "backward"), place()


def install() -> None:
    """Wrap the stages of ``torch.distributed.pipelining``, when a program imports them."""
    when_imported("torch.distributed.pipelining.stage", _wrap_stages)


def _wrap_stages(module: Any) -> None:
    """Record the phase of the tensors in the sends that stages make, and the place that is set meanwhile.

    The class is torch's own business; where a version has none of that name, sends are told apart by rank.
    """
    stages = getattr(module, "_PipelineStageBase", None)
    for name, meant in _METHODS.items():
        method = getattr(stages, name, None)
        if method is not None and not getattr(method, "hybridcomp", False):
            setattr(stages, name, _noting(method, meant))


def _noting(method: Callable[..., list[Any]], meant: str) -> Callable[..., list[Any]]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> list[Any]:
        ops = method(*args, **kwargs)
        for op in ops:
            _sent[op.tensor] = meant, place()
        return ops

    wrapped.hybridcomp = True  # type: ignore[attr-defined]
    return wrapped
