"""Have process groups decide about codecs together, so that copies of parameters in several of them stay alike."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.exchange.group import ExchangeGroup

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

_larger: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def decide_together(group: dist.ProcessGroup, larger: dist.ProcessGroup) -> None:
    """Decide in a process group by what all ranks of a larger one measure, alike in all groups that it is made of.

    With tensor parallelism each rank of a replica has a data-parallel group of its own. Where a policy decides as
    training goes on (``auto``, rules with ``adapt``), these would decide apart, by times and values of their own, and
    the replica's copies of parameters that are not split would drift apart::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        hct.decide_together(mesh["dp"].get_group(), dist.group.WORLD)

    Collective over the larger group. Call it before hooks, FSDP2 modules or :class:`.LocalSGD` first use the group.
    All groups must send the same messages, in the same order. Groups of other backends than hybridcomp's are checked
    where they are first used, and what is wrong is raised there.

    Args:
        group: process group of this rank whose messages are decided about.
        larger: process group of all ranks of this one and of the other groups, which all have as many.

    Raises:
        ValueError: on all ranks; the larger group lacks a rank of a group, these have unlike numbers of ranks, or
            their backend is hybridcomp's and that of the larger one is not.
        MismatchError: on all ranks; the groups have unlike policies.
    """
    comm, other = getattr(group, "comm", None), getattr(larger, "comm", None)
    if (comm is None) != (other is None):
        raise ValueError(
            f"groups that decide together must have one backend, not {_backend(group)} and {_backend(larger)}"
        )
    if comm is not None:
        comm.decide_together(other)
    _larger[group] = larger


def _backend(group: Any) -> str:
    """Return the backend that carries a group, whatever name it answers to."""
    return "hybridcomp" if hasattr(group, "comm") else str(dist.get_backend(group))


def decides_together(group: Any) -> bool:
    """Tell whether a process group decides by what all ranks of a larger one measure."""
    return group in _larger


def join(comm: Communicator | TorchCommunicator, group: Any) -> None:
    """Have a communicator that was made beside a group's own decide as its group does; collective as the group is."""
    larger = _larger.get(group)
    if larger is None:
        return
    if isinstance(comm, TorchCommunicator):
        comm.decide_together(ExchangeGroup(larger))
    else:
        comm.decide_together(larger.comm)
