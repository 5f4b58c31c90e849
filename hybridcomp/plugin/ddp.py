"""Compress the gradients of every ``DistributedDataParallel`` that a program makes: ``HYBRIDCOMP_HOOK=1``.

The hook is registered before a module's first forward pass, so that a program that registers one of its own until then
keeps it: torch takes only one.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hybridcomp.variables import HOOK

_OWN = "_hybridcomp_own_hook"  # attribute of a module that has a hook which torch does not list


def install() -> None:
    """Wrap DistributedDataParallel's constructor, and its method that registers one of torch's own hooks, once."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415  (torch is being imported)

    cls: Any = DistributedDataParallel
    begin, builtin = cls.__init__, cls._register_builtin_comm_hook

    @functools.wraps(begin)
    def begin_then_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if HOOK.read():
            self.register_forward_pre_hook(_Waiting())

    @functools.wraps(builtin)
    def note_builtin(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _OWN, True)
        return builtin(self, *args, **kwargs)

    cls.__init__ = begin_then_wait
    cls._register_builtin_comm_hook = note_builtin


class _Waiting:
    """Forward pre-hook that registers the communication hook once, unless the program has registered one."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, module: Any, _: Any) -> None:
        if self._done:
            return
        self._done = True
        if not module._comm_hooks and not hasattr(module, _OWN):
            hct = importlib.import_module("hybridcomp.torch")
            module.register_comm_hook(hct.HookState(module=module), hct.comm_hook)
