"""Reshard states of hooks, FSDP2 models and process groups to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hybridcomp.codecs.feedback.resharding import reshard
from hybridcomp.torch.memory import STEP, Arrays, as_array

State = Mapping[str, torch.Tensor]


def reshard_state(states: Sequence[State], ranks: int) -> list[dict[str, torch.Tensor]]:
    """Reshard the states that :func:`hybridcomp.torch.state_dict` returned on some ranks to another number of ranks.

    The sum of all ranks' residuals is what error feedback still has to send, and does not change: new rank r goes on
    with the sum of the residuals of old ranks r, r + ranks, ...; see :mod:`.resharding` for each form. PowerSGD's
    factors, counts of steps and decisions are the same on all ranks. References of FSDP2's differences are dropped: the
    first parameters are sent uncompressed again.

    Args:
        states: states of all ranks of one data-parallel group, in their order. Ranks that hold different parts of the
            model (of a tensor-parallel group, of a pipeline) are resharded apart.
        ranks: number of ranks of the new group.

    Returns:
        A state for each new rank, for :func:`hybridcomp.torch.load_state_dict`.

    Raises:
        ValueError: no state, or states that do not fit each other, or a key that no state has.
    """
    if not states:
        raise ValueError("states must hold the state of at least one rank")
    old = [{key: as_array(value) for key, value in state.items()} for state in states]
    owners = dict.fromkeys(key.partition("/")[0] for state in old for key in state)
    new: list[Arrays] = [{} for _ in range(ranks)]
    for owner in owners:
        mine = [_below(state, f"{owner}/") for state in old]
        kept = reshard([_below(part, "residual/") for part in mine], ranks)
        shared = _shared(mine, owner)
        for state, residuals in zip(new, kept, strict=True):
            state |= {f"{owner}/residual/{key}": array for key, array in residuals.items()}
            state |= {f"{owner}/{key}": array.copy() for key, array in shared.items()}
    return [{key: torch.from_numpy(np.array(array)) for key, array in state.items()} for state in new]


def _below(state: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    return {key.removeprefix(prefix): array for key, array in state.items() if key.startswith(prefix)}


def _shared(parts: Sequence[Arrays], owner: str) -> Arrays:
    """Return the state that all new ranks have alike."""
    shared: Arrays = {}
    for part in parts:
        for key, array in part.items():
            kind = key.partition("/")[0]
            if kind == "factor":
                shared.setdefault(key, array)
            elif kind == STEP:
                shared[key] = np.maximum(shared.get(key, array), array)
            elif kind == "decided":
                if not key.endswith("/figures"):  # these are one rank's, for that step
                    shared.setdefault(key, array)
            elif kind == "ranks":
                shared[key] = np.zeros_like(array)  # for any number of them
            elif kind not in ("residual", "reference"):
                raise ValueError(f"{owner}/{key} is no part of a state that can be resharded")
    return shared
