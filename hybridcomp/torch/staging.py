"""Convert tensors to the buffers that a communicator takes, and back.

A communicator wants contiguous memory, of the CPU or of a CUDA device that the kernels run on. A tensor that is such
memory is used as it is. Any other is copied: a strided view, a conjugate, a tensor on another kind of device or where
the kernels cannot run (which is staged through host memory, and encoded there), and a dtype that messages do not name
(float8, ...), which travels as its bytes.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from hybridcomp import cuda
from hybridcomp.arrays import as_dtype
from hybridcomp.errors import CodecMismatchError, CudaUnavailableError
from hybridcomp.native import kernels


def home(tensor: torch.Tensor) -> torch.device:
    """Return the device on which a communicator takes a tensor's values: its own, or the CPU."""
    device = tensor.device
    return device if device.type == "cuda" and _runs_kernels(device.index) else torch.device("cpu")


def usable(tensor: torch.Tensor) -> bool:
    """Tell whether a communicator can use the tensor's own memory."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device == home(tensor)
    )


_PLAIN = {
    dtype: as_dtype(dtype).storage
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
}
_KINDS: frozenset[Any] = frozenset({torch.Tensor, torch.nn.Parameter})


def plain(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return a tensor's own memory as an array, if a communicator needs no more to use it; else None."""
    storage = _PLAIN.get(tensor.dtype)
    if storage is None or tensor.__class__ not in _KINDS or not tensor.is_cpu:
        return None
    try:
        if not tensor.is_contiguous() or tensor.is_neg():
            return None
        n = tensor.numel()
        span = kernels().Span(tensor.data_ptr(), n * storage.itemsize, tensor)
        return np.ndarray((n,) if tensor.dim() == 1 else tensor.shape, storage, span)
    except RuntimeError:  # another layout, or no memory of its own
        return None


def named(tensor: torch.Tensor) -> bool:
    """Tell whether messages name the tensor's dtype."""
    try:
        as_dtype(tensor.dtype)
    except CodecMismatchError:
        return False
    return True


def source(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous tensor with the values of ``tensor``, at :func:`home`; its own memory where possible.

    Args:
        tensor: any shape, strides, dtype and device; not sparse.
        dtype: dtype to convert it to; None keeps its own.

    Returns:
        A tensor of the same shape, or flat bytes for a dtype that messages do not name.
    """
    dense = _dense(tensor)
    if dtype is not None:
        dense = dense.to(dtype)
    if not usable(dense):
        dense = dense.resolve_conj().resolve_neg().contiguous().to(home(dense))
    return dense if named(dense) else dense.view(-1).view(torch.uint8)


class Target:
    """Contiguous memory that an operation writes, and the tensor that gets its values.

    Attributes:
        data: buffer to hand to the communicator: the tensor itself where possible.
        staged: whether it is other memory, whose values the tensor gets by :meth:`commit`.
    """

    def __init__(self, tensor: torch.Tensor, *, load: bool = False, dtype: torch.dtype | None = None) -> None:
        """Prepare ``tensor`` to be written.

        Args:
            tensor: any shape, strides, dtype and device; not sparse.
            load: whether the operation also reads it (a reduction in place, a broadcast's root).
            dtype: dtype of the memory; None is the tensor's own.
        """
        self._tensor = _dense(tensor)
        dtype = dtype or tensor.dtype
        self.staged = dtype != tensor.dtype or not usable(self._tensor)
        buffer = self._tensor
        if self.staged:
            buffer = torch.empty(tensor.shape, dtype=dtype, device=home(tensor))
            if load:
                buffer.copy_(self._tensor)
        self._buffer = buffer
        known = dtype in _PLAIN or named(buffer)
        self.data = buffer if known else buffer.view(-1).view(torch.uint8)

    def commit(self) -> None:
        """Copy the values to the tensor, once the operation has ended; autograd's count of versions stays."""
        if self.staged:
            self._tensor.data.copy_(self._buffer)


def overwrite(output: torch.Tensor) -> None:
    """Tell autograd that an operation overwrites ``output``, where gloo tells it, too: gloo copies there."""
    if not output.is_inference():
        increment_version(output)


@functools.cache
def _runs_kernels(ordinal: int) -> bool:
    try:
        cuda.runtime_of(ordinal)
    except CudaUnavailableError as error:
        warnings.warn(
            f"hybridcomp: tensors on cuda:{ordinal} are copied to host memory and encoded there: {error}",
            stacklevel=2,
        )
        return False
    return True


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"hybridcomp carries dense tensors, not {tensor.layout}")
    return tensor.detach()
