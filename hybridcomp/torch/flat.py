"""Divide flat tensors among tensors that lie in them, complex ones as pairs of reals."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def real_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor's real numbers: a complex one's gets a trailing 2 (``torch.view_as_real``)."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def as_real(flat: Tensor) -> Tensor:
    """Return a contiguous 1-D tensor, or a complex one's memory as twice as many reals."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def views(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Return parts of ``flat``, 1-D, in the shapes of the tensors, one after the other.

    Args:
        flat: tensor of as many elements as the others have; if it is real, of two for each of a complex tensor's.
        like: tensors whose shapes are taken. In a real ``flat`` complex ones come first, as their pairs are aligned.
    """
    tensors = list(like)
    if flat.is_complex():
        parts = torch.split(flat, [t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    parts = torch.split(flat, [t.numel() * (1 + t.is_complex()) for t in tensors])
    return [_shaped(part, t) for part, t in zip(parts, tensors, strict=True)]


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    shaped = part.view(real_shape(like))
    return torch.view_as_complex(shaped) if like.is_complex() else shaped
