"""Compress the gradients of every ``DistributedDataParallel`` that a program makes: ``HYBRIDCOMP_HOOK=1``.

The hook is registered before a module's first forward pass, so that a program that registers one of its own until then
keeps it. One that comes later takes the hook's place: torch takes only one, so this one calls it. Where this hook
cannot be used the module goes on without it, with a warning: no program fails by the variable.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from typing import Any

from hybridcomp.variables import HOOK

_OWN = "_hybridcomp_own_hook"  # attribute of a module that has a hook which torch does not list
# Backends whose groups carry the hook's messages; of others, torch's ``fake`` for instance, nobody knows.
_BACKENDS = frozenset({"hybridcomp", "gloo", "nccl", "mpi", "ucc", "xccl", "undefined"})


def install() -> None:
    """Wrap DistributedDataParallel's constructor, and its methods that register a hook, once."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415  (torch is being imported)

    cls: Any = DistributedDataParallel
    begin, register, builtin = cls.__init__, cls.register_comm_hook, cls._register_builtin_comm_hook

    @functools.wraps(begin)
    def begin_then_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if HOOK.read():
            self.register_forward_pre_hook(_Waiting())

    @functools.wraps(register)
    def register_or_follow(self: Any, state: Any, hook: Any) -> None:
        ours = _ours(self)
        if ours is None:
            register(self, state, hook)
            return
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        ours.follow(state, hook)
        self._comm_hooks[:] = [(hook, state)]

    @functools.wraps(builtin)
    def note_builtin(self: Any, comm_hook_type: Any) -> Any:
        setattr(self, _OWN, True)
        ours = _ours(self)
        if ours is None:
            return builtin(self, comm_hook_type)
        hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
        same = {"ALLREDUCE": hooks.allreduce_hook, "FP16_COMPRESS": hooks.fp16_compress_hook}
        ours.follow(self.process_group, same[comm_hook_type.name])
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self._comm_hooks.clear()
        return None

    cls.__init__ = begin_then_wait
    cls.register_comm_hook = register_or_follow
    cls._register_builtin_comm_hook = note_builtin


def _ours(module: Any) -> _Automatic | None:
    """Return the state of this hook, where it is the one that a module has."""
    found = [state for _, state in module._comm_hooks if isinstance(state, _Automatic)]
    return found[0] if found and found[0].registered else None


class _Waiting:
    """Forward pre-hook that registers the communication hook once, unless the program has registered one."""

    def __init__(self) -> None:
        self._done = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_done": False}  # torch registers no hook with a copy of a module

    def __call__(self, module: Any, _: Any) -> None:
        if not self._done:
            self._done = True
            _register(module)


def _register(module: Any) -> None:
    """Register the hook with a module, unless it has one or cannot take this one."""
    copied = [state for _, state in module._comm_hooks if isinstance(state, _Automatic)]
    if copied:
        module._comm_hooks.clear()
    if module._comm_hooks or hasattr(module, _OWN):
        return
    why = _refusal(module)
    if why is None:
        hct = importlib.import_module("hybridcomp.torch")
        state = copied[0] if copied else _Automatic(hct.HookState(module=module))
        state.attach(module)
        try:
            module.register_comm_hook(state, hct.comm_hook)
            state.registered = True
            return
        except (RuntimeError, TypeError, ValueError) as error:
            module._comm_hooks.clear()
            why = str(error)
    warnings.warn(f"{HOOK}: a module goes on without the hook: {why}", stacklevel=2)


def _refusal(module: Any) -> str | None:
    """Say why a module cannot take the hook; None where it can."""
    import torch.distributed as dist  # noqa: PLC0415  (torch is being imported)

    if getattr(module, "_use_python_reducer", False):
        return "torch's Python reducer hands out no buckets"
    config = str(dist.get_backend_config(module.process_group))
    backends = {pair.rpartition(":")[2] for pair in config.split(",")}
    strange = sorted(backends - _BACKENDS)
    return f"nothing is known of the backend {strange[0]}" if strange else None


class _Automatic:
    """State of the hook that the variable asks for: a HookState, until the program registers a hook of its own.

    Attributes:
        state: the HookState.
        registered: whether torch has it.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.registered = False
        self._module: Any = None
        self._instead: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "registered": False, "_module": None, "_instead": None}

    def attach(self, module: Any) -> None:
        """Note the module, and have a copied state take its names from it."""
        self._module = weakref.ref(module)
        self.state.attach(module)

    def follow(self, state: Any, hook: Any) -> None:
        """Call another hook from now on."""
        self._instead = (state, hook)

    def submit(self, bucket: Any) -> Any:
        """Queue a bucket; called by :func:`hybridcomp.torch.comm_hook`."""
        if self._instead is not None:
            state, hook = self._instead
            return hook(state, bucket)
        module = self._module()
        if module is None or not module._join_config.enable or module._divide_by_initial_world_size:
            return self.state.submit(bucket)
        ranks, training = module.process_group.size(), _training(module)
        return self.state.submit(bucket).then(lambda done: done.value().mul_(ranks / training))


def _training(module: Any) -> float:
    """Return how many ranks have not joined, by which DDP divides in ``join(divide_by_initial_world_size=False)``.

    Collective over the module's group. Ranks that have joined send zeros from outside of a backward pass.
    """
    import torch  # noqa: PLC0415  (torch is being imported)

    count = torch.tensor(float(torch._C._current_graph_task_id() != -1), device=module.device)
    torch.distributed.all_reduce(count, group=module.process_group)
    return max(1.0, count.item())
