"""Define a decoder-only GPT: pre-norm blocks, causal attention, learned positions, GELU MLP, a head, tied or not.

The model is after Radford et al. 2019 (GPT-2), without biases in the linear layers and without dropout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridcomp_lab.train.model.autoencoder import Autoencoder
from hybridcomp_lab.train.model.experts import Mixture
from hybridcomp_lab.train.model.neurons import Neurons, received

_INIT_STD = 0.02  # GPT-2's


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, by the names of the configuration's fields."""

    vocab_size: int
    layers: int
    d_model: int
    heads: int
    seq_len: int
    tie_embeddings: bool = False
    experts: int = 0
    expert_every: int = 2
    capacity_factor: float = 1.25
    tp_autoencoder: int = 0
    tp_autoencoder_from: int = 0
    pp_neurons: float = 0.0
    pp_neurons_after: Sequence[int] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelShape:
        """Take the sizes from a run's values; those that have defaults may be missing."""
        return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})


class Attention(nn.Module):
    """Causal self-attention.

    It has one fused projection whose output is laid out [heads, 3, head_dim]: a column-parallel shard of it holds
    the queries, keys and values of whole heads, and its backward needs one all-reduce where three
    projections would need three.
    """

    def __init__(self, d_model: int, heads: int, codes: int = 0) -> None:
        super().__init__()
        self.head_dim = d_model // heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.code = Autoencoder(d_model, codes) if codes else None

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``x`` [batch, time, d_model]; as many heads as this rank's shard has."""
        fused = self.qkv(x)
        batch, time, _ = fused.shape  # with sequence parallelism the projection gathers the time
        q, k, v = fused.view(batch, time, -1, 3, self.head_dim).transpose(1, 2).unbind(3)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _coded(self.out(y.transpose(1, 2).reshape(batch, time, -1)), self.code)


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, d_model: int, codes: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)
        self.code = Autoencoder(d_model, codes) if codes else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, time, d_model] to the same shape."""
        return _coded(self.down(functional.gelu(self.up(x))), self.code)


def _coded(x: Tensor, code: Autoencoder | None) -> Tensor:
    return x if code is None else code(x)


class Block(nn.Module):
    """Transformer layer; with ``codes``, the values that tp sums pass an autoencoder of so many codes."""

    def __init__(self, d_model: int, heads: int, codes: int = 0) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(d_model)
        self.attn = Attention(d_model, heads, codes)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp: nn.Module = MLP(d_model, codes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, time, d_model] to the same shape."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Embedding of tokens and positions to vectors."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens`` int64 [batch, time] to [batch, time, d_model]."""
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Whole model, or the part of it that one pipeline stage holds.

    Attributes:
        embed: embedding; only in the first stage.
        blocks: the stage's blocks by their number in the whole model.
        neurons: modules after some of the blocks that keep the largest values; by the same numbers.
        final_norm: last norm; only in the last stage, as ``head``.
    """

    embed: Embedding | None
    final_norm: nn.LayerNorm | None
    head: nn.Linear | None

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape)
        codes = [shape.tp_autoencoder if i >= shape.tp_autoencoder_from else 0 for i in range(shape.layers)]
        self.blocks = nn.ModuleDict(
            {str(i): Block(shape.d_model, shape.heads, c) for i, c in enumerate(codes)}
        )
        if shape.experts:
            for i in range(shape.expert_every - 1, shape.layers, shape.expert_every):
                self.blocks[str(i)].mlp = Mixture(shape.d_model, shape.experts, shape.capacity_factor)
        self.neurons = nn.ModuleDict({str(i): Neurons(shape.pp_neurons) for i in shape.pp_neurons_after})
        self.final_norm = nn.LayerNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embed.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage.

        Args:
            x: tokens int64 [batch, time] in the first stage, else activations [batch, time, d_model].

        Returns:
            Logits [batch, time, vocab_size] from the last stage, else activations.
        """
        x = self.hidden(x)
        return x if self.final_norm is None else self.logits(x)

    def hidden(self, x: Tensor) -> Tensor:
        """Compute activations in any stage: the forward pass without norm and head."""
        if self.embed is not None:
            x = self.embed(x)
        elif min(map(int, self.blocks)) - 1 in self.shape.pp_neurons_after:
            x = received(x)
        for number, block in self.blocks.items():
            x = block(x)
            if number in self.neurons:
                x = self.neurons[number](x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the norm, and the head where there is one, to activations [batch, time, d_model]."""
        assert self.final_norm is not None
        normed: Tensor = self.final_norm(hidden)
        return normed if self.head is None else self.head(normed)


class OwnLoss(nn.Module):
    """Stage with a loss of its own although others follow: by a head of its own, or by synthetic labels.

    Args:
        stage: stage with a norm, and without labels a head.
        labels: vectors of the tokens, [vocab_size, d_model], that the stage learns to turn its input to; or None.
    """

    labels: Tensor | None

    def __init__(self, stage: GPT, labels: Tensor | None = None) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("labels", labels, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stage's activations, cut off from autograd, for the next stage; and what its loss is of."""
        hidden = self.stage.hidden(x)
        return hidden.detach(), self.stage.logits(hidden)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the stage's loss: mean cross-entropy, or the mean square distance to the targets' labels.

        Args:
            output: second tensor of :meth:`forward`.
            targets: next tokens, int64 [batch, time].
        """
        if self.labels is None:
            return loss_of(output, targets)
        return functional.mse_loss(output, self.labels[targets])


def synthetic_labels(shape: ModelShape, seed: int, index: int) -> Tensor:
    """Draw a stage's label for each token: standard normal values, [vocab_size, d_model], alike on all ranks.

    Karadag, Topaloglu 2024, "Partitioned Neural Network Training via Synthetic Intermediate Labels" (arXiv
    2403.11204).
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index + 1) % 2**63)
    return torch.randn(shape.vocab_size, shape.d_model, generator=generator)


def build_gpt(shape: ModelShape, seed: int) -> GPT:
    """Build the whole model; the weights depend on shape and seed only, not on how it is later split."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(shape)
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue  # LayerNorm starts as the identity
            into_residual = name.endswith(("attn.out.weight", "mlp.down.weight", "experts.down"))
            std = _INIT_STD / math.sqrt(2 * shape.layers) if into_residual else _INIT_STD
            nn.init.normal_(parameter, std=std)
        for module in model.modules():
            if isinstance(module, Autoencoder):
                module.begin()
    return model


def keep_stage(
    model: GPT,
    index: int,
    count: int,
    blocks: Iterable[int] | None = None,
    *,
    own_norm: bool = False,
    own_head: bool = False,
) -> GPT:
    """Drop the parts of ``model`` that stage ``index`` of ``count`` does not hold, and return it.

    Args:
        model: whole model.
        index: number of the stage, from 0.
        count: number of all stages.
        blocks: numbers of its blocks; None: all stages have equally many, and ``count`` divides the layers.
        own_norm, own_head: whether the stage keeps them although it is not the last, for a loss of its own.
    """
    per_stage = model.shape.layers // count
    mine = range(index * per_stage, (index + 1) * per_stage) if blocks is None else blocks
    model.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in mine})
    model.neurons = nn.ModuleDict({i: kept for i, kept in model.neurons.items() if int(i) in mine})
    if index != 0:
        model.embed = None
    if index != count - 1:
        model.final_norm = model.final_norm if own_norm else None
        model.head = model.head if own_head else None
    return model


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute mean cross-entropy in nats; ``logits`` [batch, time, vocab_size], ``targets`` int64 [batch, time]."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
