"""Tell policies that ask for it where in the model a message of the trainer belongs: see docs/techniques.md."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import hybridcomp.torch as hct
from hybridcomp.policy import Place, place, set_place
from hybridcomp.train.model.gpt import GPT

if TYPE_CHECKING:
    from hybridcomp.train.parallel.stages import Stage


def activations_of(stage: Stage, *, train: bool = True) -> AbstractContextManager[None]:
    """Name the place of a send of a stage's output, at its last layer; in training it is a link."""
    link = f"activations of stage {stage.index}" if train else None
    return hct.in_place(stage=stage.index, layer=max(map(int, stage.plain.blocks)), link=link)


def gradients_of(stage: Stage, *, cools: bool | None = None) -> AbstractContextManager[None]:
    """Name the place of a send of the gradient of a stage's input, at the last layer before it.

    Args:
        stage: stage other than the first.
        cools: whether its last forward pass of the step is done; None where the schedule has no cool-down.
    """
    part = None if cools is None else "cool-down" if cools else "steady"
    layer = min(map(int, stage.plain.blocks)) - 1
    return hct.in_place(stage=stage.index, layer=layer, part=part, link=f"gradients of stage {stage.index}")


def say_layers(model: GPT) -> None:
    """Set the layer of each block as the place of its messages, in forward and in backward."""
    for number, block in model.blocks.items():
        saying = _Saying(int(number))
        block.register_forward_pre_hook(saying.begin)
        block.register_forward_hook(saying.end, always_call=True)
        block.register_full_backward_pre_hook(saying.begin)
        block.register_full_backward_hook(saying.end)


class _Saying:
    """Setting of a layer as messages' place between two hooks; a forward pass may lie within a backward pass."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._before: list[Place] = []

    def begin(self, *_: Any) -> None:
        self._before.append(set_place(dataclasses.replace(place(), layer=self._layer)))

    def end(self, *_: Any) -> None:
        set_place(self._before.pop())
