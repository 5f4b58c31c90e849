"""Divide flat tensors among tensors that lie in them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def views(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Return parts of ``flat``, 1-D, in the shapes of the tensors, one after the other."""
    tensors = list(like)
    parts = torch.split(flat, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
