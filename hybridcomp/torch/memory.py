"""Convert the state of compression between steps to arrays by key, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridcomp.arrays import flatten
from hybridcomp.codecs import ErrorFeedback

Arrays = dict[str, npt.NDArray[Any]]
STEP = "step"


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """View a saved tensor, on any device, as an array of the machine's memory; copies only what is elsewhere."""
    flat = flatten(tensor.detach().cpu())
    return flat.data.reshape(flat.shape)  # type: ignore[no-any-return]


def pack(
    feedback: ErrorFeedback,
    factors: Mapping[str, npt.NDArray[Any]],
    step: int,
    decisions: Arrays | None = None,
) -> Arrays:
    """Return residuals, PowerSGD's factors, the step and decisions, to be saved."""
    saved = {f"residual/{key}": array for key, array in feedback.state_dict().items()}
    saved |= {f"factor/{name}": array.copy() for name, array in factors.items()}
    saved |= {f"decided/{name}": array for name, array in (decisions or {}).items()}
    return saved | ({STEP: np.array(step)} if step else {})


def unpack(
    arrays: Arrays, feedback: ErrorFeedback, factors: dict[str, npt.NDArray[Any]]
) -> tuple[int, Arrays]:
    """Replace residuals and factors by those that :func:`pack` gave; return the step and the decisions."""
    parts: dict[str, Arrays] = {"residual": {}, "factor": {}, "decided": {}, STEP: {}}
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        parts[kind][name] = array
    feedback.load_state_dict(parts["residual"])
    factors.clear()
    factors.update({name: array.copy() for name, array in parts["factor"].items()})
    return int(parts[STEP].get("", np.array(0))), parts["decided"]
