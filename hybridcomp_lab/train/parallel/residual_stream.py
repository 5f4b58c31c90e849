"""Define the residual stream between stages: the tensors that one sends to the next, and gets the gradient of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridcomp_lab.train.config import TrainConfig


@dataclass(frozen=True)
class Stream:
    """Activations of one micro-batch that a rank sends to the next stage.

    Attributes:
        shape: [micro_batch_size, time, d_model]; with sequence parallelism, this rank's part of the time.
        dtype: dtype of the elements.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return an uninitialised tensor of the stream's shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype)


def stream_of(config: TrainConfig) -> Stream:
    """Return the shape and dtype of the tensors that the stages of a run send each other."""
    time = config.seq_len // config.tp if config.sequence_parallel else config.seq_len
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.get_default_dtype()
    return Stream((config.micro_batch_size, time, config.d_model), dtype)
