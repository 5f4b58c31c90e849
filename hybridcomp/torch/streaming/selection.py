"""Choose the linear layers of a model whose gradients are streamed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def choose(model: nn.Module, exclude: Sequence[str]) -> dict[str, list[nn.Linear]]:
    """Choose layers by the rules of :func:`.stream_linear`.

    Returns:
        By the name of each weight the layers that have it.

    Raises:
        ValueError: the model is in DDP, a pattern names no layer, a weight cannot be streamed, or no layer is left,
            or a layer has a ``forward`` of its own.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "stream_linear comes before DistributedDataParallel, which has begun to wait for these gradients: give it "
            "the model, and then the model to DistributedDataParallel"
        )
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise ValueError(f"exclude {pattern!r} names no linear layer of the model")
    chosen = {
        name: layer
        for name, layer in linear.items()
        if _is_trained(layer) and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    ours = {id(layer) for layer in chosen.values()}
    others = {
        id(p)
        for module in model.modules()
        if id(module) not in ours
        for p in module.parameters(recurse=False)
    }
    found: dict[int, tuple[str, list[nn.Linear]]] = {}
    for name, layer in chosen.items():
        if id(layer.weight) not in others:
            found.setdefault(id(layer.weight), (f"{name}.weight" if name else "weight", []))[1].append(layer)
    if not found:
        raise ValueError(
            "the model has no nn.Linear with a weight of its own that is trained and not excluded"
        )
    layers = dict(found.values())
    _check([(name, of[0].weight) for name, of in layers.items()])
    _check_forward(layers)
    return layers


def _is_trained(layer: nn.Linear) -> bool:
    """Tell whether the layer has a weight of its own, no computed one, that gradients change."""
    weight = layer._parameters.get("weight")
    return weight is not None and weight.requires_grad


def _check_forward(layers: dict[str, list[nn.Linear]]) -> None:
    """Raise ValueError for a layer whose own ``forward`` would be called in the place of the streaming one."""
    for name, of in layers.items():
        if any("forward" in vars(layer) for layer in of):
            raise ValueError(f"the layer of {name} has a forward of its own, set on the instance: exclude it")


def _check(weights: Sequence[tuple[str, Tensor]]) -> None:
    for name, weight in weights:
        if hasattr(weight, "to_local"):
            raise ValueError(
                f"{name} is a DTensor, and weights that are split are not streamed: exclude its layer"
            )
        if not weight.is_floating_point():
            raise ValueError(
                f"{name} is {weight.dtype}, and streamed weights are floating-point: exclude its layer"
            )
    devices = {str(weight.device) for _, weight in weights}
    if len(devices) > 1:
        raise ValueError(
            f"streamed weights are on one device, not on {', '.join(sorted(devices))}: exclude the layers of others"
        )
