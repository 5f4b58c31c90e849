"""The rule by which stages send only the largest values, by its definition: whole tensors, one process."""

from __future__ import annotations

import math
from decimal import ROUND_DOWN, Decimal

import torch
from torch import Tensor


class Kept:
    """Hooks that keep the largest values after some blocks of a whole model, and know of nothing else.

    Attributes:
        thresholds: thresholds before each step, by block.
        shares: shares of values that went on, of each step and block.
    """

    def __init__(self, model, config) -> None:
        self.config = config
        self.thresholds: list[dict[int, float]] = [dict.fromkeys(config.neuron_borders, 0.0)]
        self.shares: list[dict[int, float]] = []
        self.found = dict.fromkeys(config.neuron_borders, 0)  # the step that each threshold is of
        self.version = 0
        self.seen: dict[int, list[Tensor]] = {border: [] for border in config.neuron_borders}
        for border in config.neuron_borders:
            model.blocks[str(border)].register_forward_hook(_Hook(self, border))

    def end_step(self) -> None:
        """Find the thresholds of the next step, from the passes of this one: replica by replica."""
        config, step, now = self.config, len(self.thresholds) - 1, self.thresholds[-1]
        after, shares = dict(now), {}
        for border, passes in self.seen.items():
            shares[border] = float((torch.stack(passes) >= now[border]).double().mean())
            due = not now[border] or step + 1 - self.found[border] >= config.pp_neurons_refresh
            if due or not 0.75 <= shares[border] / config.pp_neurons <= 1.25:
                last = passes[config.micro_batches - 1 :: config.micro_batches]
                parts = [x for p in last for x in p.chunk(config.tp if config.sequence_parallel else 1, 1)]
                count = math.ceil(config.pp_neurons * parts[0].numel())
                smallest = [x.flatten().topk(count).values[-1].item() for x in parts]
                mean = Decimal(sum(smallest) / len(smallest))
                after[border] = float(mean.quantize(Decimal(1).scaleb(mean.adjusted() - 5), ROUND_DOWN))
                self.found[border] = step + 1
            passes.clear()
        self.thresholds.append(after)
        self.shares.append(shares)


class _Hook:
    """Hook that keeps the largest values of what a block returns."""

    def __init__(self, kept: Kept, border: int) -> None:
        self.kept, self.border = kept, border

    def __call__(self, module, inputs, output: Tensor) -> Tensor:
        kept = self.kept
        if torch.is_grad_enabled():
            kept.seen[self.border].append(output.detach().abs())
        return output * (output.detach().abs() >= kept.thresholds[kept.version][self.border])
