"""Replace FSDP2's own all-gather and reduce-scatter by compressed ones."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

if TYPE_CHECKING:
    from hybridcomp.torch.fsdp.unit import Unit

Tensor = torch.Tensor


class _Allocates:
    """An allocator that uses torch's, as FSDP2's own does."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedAllGather(_Allocates, AllGather):
    """The compressed all-gather of a module's parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Start the all-gather. The work is waited for before parameters are used, whatever ``async_op`` says: so
        prefetched parameters are on their way while the module before computes."""
        return self._unit.all_gather(output_tensor, input_tensor, group)


class CompressedReduceScatter(_Allocates, ReduceScatter):
    """The compressed reduce-scatter of a module's gradients.

    Attributes:
        parameters: parameters of the next buffer, those that have gradients; None if they were not told.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.parameters: list[Any] | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce at once: FSDP2 uses the output on return."""
        parameters, self.parameters = self.parameters, None
        self._unit.reduce_scatter(output_tensor, input_tensor, group, op, parameters)

    def has_replicas(self, group: Any) -> bool:
        """Tell whether a group of replicas is this one's to reduce over."""
        return group is not None and self._unit.compresses_replicas

    def all_reduce(self, output: Tensor, group: Any, parameters: list[Any]) -> None:
        """Average this rank's part of gradients over the replicas, in place."""
        self._unit.all_reduce(output, group, parameters)


# Arguments of torch's function that hand over an all-reduce.
_REPLICAS = {
    "all_reduce_grads",
    "all_reduce_group",
    "all_reduce_hook",
    "fsdp_params",
    "gradient_divide_factor",
    "partial_reduce_output",
}


def _among_replicas(comm: CompressedReduceScatter, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by which the hook for an all-reduce does what FSDP2 does in a group of replicas.

    FSDP2 then divides by the number of shards alone, and the replicas' mean does the rest. Where the program has given
    the divisor, FSDP2 divides by it, and sums over the replicas.
    """
    replicas, partial, then = (
        given["all_reduce_group"],
        given["partial_reduce_output"],
        given["all_reduce_hook"],
    )
    parameters, divided = list(given["fsdp_params"]), given["gradient_divide_factor"] is not None

    def reduce(output: Tensor) -> None:
        if partial is not None:  # of backward passes before, whose gradients stayed with their replica
            output += partial
        comm.all_reduce(output, replicas, parameters)
        if divided:
            output *= replicas.size()
        if then is not None:
            then(output)

    return {**given, "all_reduce_group": None, "partial_reduce_output": None, "all_reduce_hook": reduce}


def install() -> None:
    """Patch FSDP2, once, to tell a :class:`CompressedReduceScatter` which parameters are in its buffer, and to have it
    reduce over replicas, where the policy compresses that.

    Those without a gradient in a step (an expert that no token chose) are not, and a buffer's size alone does not say
    which. The function is torch's own business; where a version has none of that name, a module's gradients are
    compressed while all of its parameters have one.
    """
    function = getattr(_fsdp_param_group, "foreach_reduce", None)
    if function is None or getattr(function, "hybridcomp", False):
        return
    signature = inspect.signature(function)
    if not {"fsdp_params", "reduce_scatter_comm"} <= signature.parameters.keys():
        return

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        comm = given["reduce_scatter_comm"]
        if isinstance(comm, CompressedReduceScatter):
            comm.parameters = list(given["fsdp_params"])
            if (
                given.keys() >= _REPLICAS
                and given["all_reduce_grads"]
                and comm.has_replicas(given["all_reduce_group"])
            ):
                return function(**_among_replicas(comm, given))
        return function(*args, **kwargs)

    wrapped.hybridcomp = True  # type: ignore[attr-defined]
    _fsdp_param_group.foreach_reduce = wrapped  # type: ignore[attr-defined]
