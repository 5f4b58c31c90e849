"""Cut a model's parameters into fragments, which are synchronised at different steps."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from hybridcomp.codecs import checks

Parameters = dict[str, nn.Parameter]


def trained(module: nn.Module) -> Parameters:
    """Return the parameters that an optimizer may change, by name.

    Raises:
        ValueError: there is none.
    """
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("the model has no parameter that is trained: there is nothing to synchronise")
    return found


def cut(model: nn.Module, fragments: int | Sequence[nn.Module]) -> list[Parameters]:
    """Cut a model's trained parameters into fragments.

    Args:
        model: the whole model.
        fragments: number of runs of neighbouring parameters, of about as many elements each; or one module for each
            fragment, which together have every parameter once.

    Raises:
        ValueError: a fragment would be empty, or modules share or leave out a parameter.
    """
    found = trained(model)
    if checks.is_integer(fragments):
        return runs(found, fragments)
    if isinstance(fragments, Iterable):
        return _of_modules(found, fragments)
    raise ValueError(f"fragments must be an integer, at least 1, or modules, not {fragments!r}")


def runs(parameters: Mapping[str, nn.Parameter], count: int) -> list[Parameters]:
    """Cut parameters into runs of neighbours, of about as many elements each.

    Raises:
        ValueError: a run would be empty.
    """
    if not 1 <= count <= len(parameters):
        raise ValueError(
            f"fragments must be from 1 to the number of trained parameters ({len(parameters)}), not {count}"
        )
    sizes = [p.numel() for p in parameters.values()]
    before = [0, *itertools.accumulate(sizes)]
    edges = [0]
    for number in range(1, count):
        wanted = before[-1] * number / count
        at = bisect.bisect_left(before, wanted)
        if at and wanted - before[at - 1] < before[at] - wanted:
            at -= 1
        edges.append(min(max(at, edges[-1] + 1), len(sizes) - count + number))
    named = list(parameters.items())
    return [dict(named[first:last]) for first, last in itertools.pairwise([*edges, len(sizes)])]


def _of_modules(found: Parameters, modules: Iterable[nn.Module]) -> list[Parameters]:
    names = {id(parameter): name for name, parameter in found.items()}
    owner: dict[str, int] = {}
    cuts: list[Parameters] = []
    for number, module in enumerate(modules):
        mine = [p for p in module.parameters() if p.requires_grad]
        for parameter in mine:
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(f"fragment {number} has a parameter that the model has not")
            if name in owner:
                raise ValueError(f"{name} is in fragments {owner[name]} and {number}: a parameter is in one")
            owner[name] = number
        if not mine:
            raise ValueError(f"fragment {number} has no parameter that is trained")
        cuts.append({names[id(parameter)]: parameter for parameter in mine})
    left = [name for name in found if name not in owner]
    if left:
        raise ValueError(
            f"no fragment has {left[0]}, and {len(left) - 1} others: together they are the model"
        )
    return cuts
