"""Send the parameters that ``ZeroRedundancyOptimizer`` broadcasts exactly, whatever policy there is for broadcasts.

The broadcast is all that a parameter's owner has of it: there is no copy of full precision beside it. A lossy one would
round the optimizer's own parameters at every step, and updates smaller than the rounding would be lost for good.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from hybridcomp.codecs import get_codec
from hybridcomp.imports import when_imported
from hybridcomp.policy import Choice

_EXACT = Choice(get_codec("none"), None, "ZeRO's parameters have no other copy")

_inside = threading.local()


def broadcast_override() -> Choice | None:
    """Return the choice that sends this thread's broadcasts: exact within that optimizer, else None, for the policy."""
    return _EXACT if getattr(_inside, "zero", False) else None


def install() -> None:
    """Wrap the functions that broadcast, in the step and in the hook that overlaps it with DDP, when they are imported.

    Both are torch's own business; where a version has none of these names, its broadcasts follow the policy.
    """
    when_imported("torch.distributed.optim.zero_redundancy_optimizer", _wrap_optimizer)
    when_imported("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook", _wrap_hook)


def _wrap_optimizer(module: Any) -> None:
    _wrap(getattr(module, "ZeroRedundancyOptimizer", None), "_broadcast_params_from_rank")


def _wrap_hook(module: Any) -> None:
    _wrap(module, "_broadcast_bucket")


def _wrap(owner: Any, name: str) -> None:
    function = getattr(owner, name, None)
    if function is not None and not getattr(function, "hybridcomp", False):
        setattr(owner, name, _exactly(function))


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_inside, "zero", False)
        _inside.zero = True
        try:
            return function(*args, **kwargs)
        finally:
            _inside.zero = before

    wrapped.hybridcomp = True  # type: ignore[attr-defined]
    return wrapped
