"""Run several batches at a time: while the bytes of one are on the wire, another is encoded or decoded.

Exchanges start in one order on all ranks: a new batch starts its first, then each older one goes on by one. When no
other batch follows for a while, the older ones go on in turn until all have ended.
"""

from __future__ import annotations

from hybridcomp.torch.exchange.batch import Batch

_failed: list[Batch] = []  # kept for good: a backend or a device may still write to their buffers


class Pipeline:
    """The batches in flight; every method is called by one thread."""

    def __init__(self) -> None:
        self._flying: list[Batch] = []

    def start(self, batch: Batch) -> None:
        """Start a batch, and let each older one go on by one exchange."""
        older = list(self._flying)
        batch.start()
        self._flying.append(batch)
        self._drop_if_ended(batch)
        for each in older:
            self._advance(each)

    def flush(self, batch: Batch | None = None) -> None:
        """Let all batches go on in turn until one has ended, or all have.

        Args:
            batch: the batch to end; None for all.
        """
        while self._flying and (batch is None or batch in self._flying):
            for each in list(self._flying):
                self._advance(each)

    def _advance(self, batch: Batch) -> None:
        batch.advance()
        self._drop_if_ended(batch)

    def _drop_if_ended(self, batch: Batch) -> None:
        if batch.ended:
            self._flying.remove(batch)
            if batch.failed:
                _failed.append(batch)
