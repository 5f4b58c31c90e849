"""Describe the stages that a rank trains: their parameters, and the operations of a pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hybridcomp.arrays import DType
from hybridcomp.errors import ConfigError
from hybridcomp_lab.planner.compute import Work
from hybridcomp_lab.train.config import TrainConfig

_FP32 = 4
BYTE_VOCABULARY = 256
FILE_VOCABULARY = 50304


@dataclass(frozen=True)
class StageShape:
    """Part of the model, one of those it is cut into, as one rank of tp holds it.

    Attributes:
        index: place among the stages, from 0.
        count: number of all stages.
        blocks: the numbers of its blocks.
        parameters: names and shapes, in the model's order.
        has_head: whether it computes logits and a loss.
    """

    index: int
    count: int
    blocks: tuple[int, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    has_head: bool

    @property
    def elements(self) -> int:
        """Return the number of its parameters' elements."""
        return sum(math.prod(shape) for _, shape in self.parameters)


def vocabulary(config: TrainConfig) -> int:
    """Return the size of the vocabulary as the trainer finds it: that of bytes where no setting gives another."""
    if config.vocab_size is not None:
        return config.vocab_size
    return FILE_VOCABULARY if (config.data or "").endswith(".bin") else BYTE_VOCABULARY


@functools.lru_cache(64)
def _parameters(
    vocab: int, layers: int, d_model: int, heads: int, seq_len: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes of the whole model's parameters, taken from the model itself, without memory for it."""
    import torch  # noqa: PLC0415  (a second)

    from hybridcomp_lab.train.model.gpt import GPT, ModelShape  # noqa: PLC0415

    with torch.device("meta"):
        model = GPT(ModelShape(vocab, layers, d_model, heads, seq_len))
    return tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


@functools.lru_cache(256)
def stages_of(config: TrainConfig) -> tuple[StageShape, ...]:
    """Cut the model of a configuration into its stages.

    Raises:
        ConfigError: mixtures of experts, which cannot be predicted.
    """
    from hybridcomp_lab.train.parallel.tensor_parallel import part_shape  # noqa: PLC0415  (imports torch)

    if config.experts:
        raise ConfigError(
            f"experts must be 0: mixtures are not predicted, and {config.experts} are asked for"
        )
    shape = vocabulary(config), config.layers, config.d_model, config.heads, config.seq_len
    whole = [(name, part_shape(name, of, config.tp)) for name, of in _parameters(*shape)]
    count, own_head = config.stages, config.schedule == "local"
    found = []
    for index in range(count):
        blocks = tuple(config.blocks_of(index))
        head = index == count - 1 or own_head
        kept = [
            (name, of)
            for name, of in whole
            if (name.startswith("blocks.") and int(name.split(".")[1]) in blocks)
            or (name.startswith("embed.") and index == 0)
            or (name.startswith(("final_norm.", "head.")) and head)
        ]
        if config.tie_embeddings and count == 1:
            kept = [(name, of) for name, of in kept if name != "head.weight"]
        found.append(StageShape(index, count, blocks, tuple(kept), head))
    return tuple(found)


def norm(config: TrainConfig) -> Work:
    """Return the forward work of a norm."""
    parts = config.tp if config.sequence_parallel else 1
    return Work("norm", bytes=2 * item_bytes(config) * _tokens(config) * config.d_model / parts)


def attention(config: TrainConfig) -> Work:
    """Return the forward work of a block's attention, with the addition to the residual stream."""
    tokens, d, part = _tokens(config), config.d_model, config.d_model / config.tp
    flops = 2 * tokens * d * 4 * part + 4 * tokens * config.seq_len * part
    scores = tokens * config.seq_len * config.heads / config.tp
    nbytes = item_bytes(config) * (4 * tokens * d + 5 * tokens * part + scores) + _FP32 * 4 * d * part
    return Work("attention", flops=flops, bytes=nbytes, half=config.dtype == "bf16")


def mlp(config: TrainConfig) -> Work:
    """Return the forward work of a block's MLP, with the addition to the residual stream."""
    tokens, d, part = _tokens(config), config.d_model, 4 * config.d_model / config.tp
    nbytes = item_bytes(config) * (4 * tokens * d + 4 * tokens * part) + _FP32 * 2 * d * part
    return Work("mlp", flops=4 * tokens * d * part, bytes=nbytes, half=config.dtype == "bf16")


def embedding(config: TrainConfig) -> Work:
    """Return the forward work of the embedding."""
    return Work("embedding", bytes=3 * _FP32 * _tokens(config) * config.d_model)


def head(config: TrainConfig) -> Work:
    """Return the forward work of the last projection and the loss."""
    tokens, d, vocab = _tokens(config), config.d_model, vocabulary(config)
    nbytes = item_bytes(config) * tokens * d + _FP32 * (4 * tokens * vocab + d * vocab)
    return Work("head", flops=2 * tokens * d * vocab, bytes=nbytes, half=config.dtype == "bf16")


def optimizer(elements: int) -> Work:
    """Return the work of clipping and updating so many elements: weight, gradient and two moments, nine passes."""
    return Work("optimizer", bytes=9 * _FP32 * elements)


def backward(work: Work, config: TrainConfig) -> Work:
    """Return the backward work of a forward one: both factors of a product get a gradient."""
    extra = 0.0
    if work.operation == "embedding":  # its gradient has all rows
        extra = 3 * _FP32 * config.d_model * (vocabulary(config) + config.seq_len)
    return dataclasses.replace(work, direction="backward", flops=2 * work.flops, bytes=2 * work.bytes + extra)


def block_parts(config: TrainConfig) -> Iterator[tuple[Work, Work]]:
    """Yield the parts of a block between which tp sums: a norm, and the layer that follows it."""
    yield norm(config), attention(config)
    yield norm(config), mlp(config)


def _tokens(config: TrainConfig) -> int:
    return config.micro_batch_size * config.seq_len


def compute_dtype(config: TrainConfig) -> DType:
    """Return the dtype that passes compute in, and send."""
    return DType.BFLOAT16 if config.dtype == "bf16" else DType.FLOAT32


def item_bytes(config: TrainConfig) -> int:
    """Return the bytes of an element of an activation."""
    return compute_dtype(config).itemsize
