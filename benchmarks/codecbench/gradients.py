"""Gradients of the GPT trainer's model on its own text, as data parallelism would reduce them.

One process trains, nothing split, nothing compressed. Gradients are taken before clipping, from as many steps as the
wanted size needs, with training going on in between: nothing is repeated.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt, loss_of
from hybridcomp_lab.train.optimizer.optimizers import learning_rate, make_optimizer, set_learning_rate
from hybridcomp_lab.train.text import load_corpus

BETWEEN = 5  # steps between those whose gradients are taken

Tensors = tuple[tuple[int, tuple[int, ...]], ...]


def collect(n: int, *, small: bool = False) -> tuple[str, npt.NDArray[np.float32], Tensors]:
    """Train a while, then take gradients.

    Args:
        n: number of elements; the last tensor taken is cut off there.
        small: a smaller model and text, and fewer steps before the first is taken.

    Returns:
        Description in words; gradients, float32 of ``n`` elements in the parameters' order; start and shape of each
        tensor in them.
    """
    config = TrainConfig(micro_batches=1)
    before = 20
    if small:
        config = TrainConfig(
            data=str(Path(json.__file__).parent),
            layers=2,
            d_model=64,
            seq_len=64,
            micro_batches=1,
            micro_batch_size=2,
        )
        before = 0
    corpus = load_corpus(config.data, config.tokenizer, config.val_fraction, config.vocab_size)
    batches = Batches(corpus, config)
    shape = ModelShape(corpus.vocab_size, config.layers, config.d_model, config.heads, config.seq_len)
    model = build_gpt(shape, config.seed)
    parameters = dict(model.named_parameters())
    optimizer = None  # made only if a second step is needed: torch takes seconds to load its optimizers
    values = np.empty(n, np.float32)
    tensors: list[tuple[int, tuple[int, ...]]] = []
    filled, taken = 0, []
    for step in itertools.count():
        batch = torch.from_numpy(batches.train(step, 0))
        loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
        if step >= before and (step - before) % BETWEEN == 0:
            taken.append(step)
            filled = _take(parameters, values, filled, tensors)
            if filled == n:
                break
        optimizer = optimizer or make_optimizer(parameters, config)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        set_learning_rate(optimizer, learning_rate(config, step))
        optimizer.step()
        optimizer.zero_grad()
    count = sum(p.numel() for p in parameters.values())
    says = (
        f"gradients of the trainer's GPT ({config.layers} layers, width {config.d_model}, {count / 1e6:.1f} M "
        f"parameters, {config.tokens_per_step} tokens a step of {corpus.source}) at "
        f"step {', '.join(map(str, taken))}, before clipping"
    )
    return says, values, tuple(tensors)


def _take(
    parameters: dict[str, torch.nn.Parameter],
    values: npt.NDArray[np.float32],
    filled: int,
    tensors: list[tuple[int, tuple[int, ...]]],
) -> int:
    """Append all gradients to ``values`` from ``filled`` on, as far as there is room; return the new end."""
    for parameter in parameters.values():
        assert parameter.grad is not None
        room = min(parameter.numel(), values.size - filled)
        if room == 0:
            break
        values[filled : filled + room] = parameter.grad.detach().reshape(-1)[:room].numpy()
        whole = room == parameter.numel()
        tensors.append((filled, tuple(parameter.shape) if whole else (room,)))
        filled += room
    return filled
