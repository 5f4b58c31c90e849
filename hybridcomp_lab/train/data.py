"""Make batches: a pure function of the corpus, the seed, the step and the replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.text import Corpus, Tokens, check_range

Batch = npt.NDArray[np.int64]
"""Tokens [sequences, seq_len + 1]: inputs are all columns but the last, targets all but the first."""


class Batches:
    """Training and evaluation batches of one replica.

    Sequence ``i`` of the global batch of a step is the same for every dp, so runs of different shape train on
    the same text in the same order.

    Raises:
        ConfigError: the text is shorter than one batch.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        self._corpus = corpus
        self._config = config
        need = config.tokens_per_step + 1
        if corpus.train.size < need:
            raise ConfigError(
                f"the text is shorter than one batch: {corpus.source} has {corpus.train.size} tokens to "
                f"train on, a batch takes {need} (dp * micro_batches * micro_batch_size * seq_len + 1)"
            )
        if config.eval_batches and corpus.held_out.size < config.seq_len + 1:
            raise ConfigError(
                f"the held-out text is shorter than one sequence: {corpus.held_out.size} tokens of "
                f"{corpus.source}, a sequence takes {config.seq_len + 1}; "
                "raise val_fraction or set eval_batches = 0"
            )

    def train(self, step: int, replica: int, shares: Sequence[int] | None = None) -> Batch:
        """Return the batch of 0-based ``step`` for a replica: micro_batches * micro_batch_size random windows.

        Args:
            step: step from 0.
            replica: number of the replica, from 0.
            shares: micro-batches of each replica, with the configuration's sum; None: the configured number for each.
        """
        config = self._config
        each = [config.micro_batches] * config.dp if shares is None else shares
        generator = np.random.default_rng([config.seed, step])
        starts = generator.integers(
            0, self._corpus.train.size - config.seq_len, size=config.dp * config.replica_batch
        )
        first, own = (config.micro_batch_size * n for n in (sum(each[:replica]), each[replica]))
        mine = starts[first : first + own]
        return self._windows(self._corpus.train, mine)

    def evaluate(self, replica: int) -> list[Batch]:
        """Return the evaluation's micro-batches for a replica: windows spread evenly over the held-out text."""
        config = self._config
        per_replica = config.eval_batches * config.micro_batch_size
        last = self._corpus.held_out.size - config.seq_len - 1
        starts = np.linspace(0, last, num=config.dp * per_replica).astype(np.int64)
        mine = starts[replica * per_replica : (replica + 1) * per_replica]
        return [
            self._windows(self._corpus.held_out, mine[i : i + config.micro_batch_size])
            for i in range(0, per_replica, config.micro_batch_size)
        ]

    def _windows(self, tokens: Tokens, starts: npt.NDArray[np.int64]) -> Batch:
        length = self._config.seq_len + 1
        batch = np.stack([tokens[start : start + length] for start in starts]).astype(np.int64)
        check_range(batch, self._corpus.vocab_size, self._corpus.source)
        return batch
