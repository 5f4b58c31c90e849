"""Run several batches at a time: while the bytes of one are on the wire, another is encoded or decoded.

Exchanges start in one order on all ranks: a new batch starts its first, then each older one goes on by one. When no
other batch follows for a while, the older ones go on in turn until all have ended. A thread does all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridcomp.torch.exchange.batch import Batch


class Pipeline:
    """The batches in flight; every method is called by one thread.

    Args:
        keep: function that keeps a batch which has failed, for as long as somebody may still write to its buffers.
    """

    def __init__(self, keep: Callable[[Batch], None]) -> None:
        self._flying: list[Batch] = []
        self._keep = keep

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
                self._keep(batch)
