"""The axis of a mesh dimension that spans all ranks.

``DeviceMesh`` makes a group, described as ``mesh_dp``, for every dimension but one that spans all ranks: that one
shares the default group, whose description does not change. Without more, a plain ``init_device_mesh("cpu", (8,),
mesh_dim_names=("dp",))`` would not be compressed as ``dp``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_METHOD = "_init_one_process_group"


def install() -> None:
    """Patch torch, once, so that the default group takes the axis of the first mesh dimension that shares it.

    The method is torch's own business; where a version has none of that name, the default group's axis stays
    ``default``, and ``Options(axis="dp")`` names it.
    """
    method = getattr(DeviceMesh, _METHOD, None)
    if method is None or getattr(method, "hybridcomp", False):
        return
    signature = inspect.signature(method)
    if "dim_name" not in signature.parameters:
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        name = method(*args, **kwargs)
        _adopt(name, signature.bind(*args, **kwargs).arguments["dim_name"])
        return name

    wrapped.hybridcomp = True  # type: ignore[attr-defined]
    setattr(DeviceMesh, _METHOD, staticmethod(wrapped))


def _adopt(group_name: Any, axis: str) -> None:
    group: Any = dist.group.WORLD
    comm = getattr(group, "comm", None)  # only a HybridProcessGroup has one
    if comm is None or group_name != group.group_name:
        return
    if comm.axis == "default" and not axis.startswith("dim_"):
        comm.axis = axis
