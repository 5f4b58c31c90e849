"""Count a hook's statistics, by axis, codec and reason."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hybridcomp.arrays import DType
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.stats import allreduce_bytes
from hybridcomp.torch.hook.plan import Piece


class Counts:
    """The totals by kind; safe to use from several threads.

    Attributes:
        apart: what follows the reason of each choice: see :class:`.TorchCommunicator`.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.apart = ""
        self._rows: dict[tuple[str, str, str, str], StatRow] = {}
        self._lock = threading.Lock()

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        with self._lock:
            return [row for _, row in sorted(self._rows.items())]

    def add_alone(self, nbytes: int) -> None:
        """Count a bucket of the only rank, which sends nothing."""
        self._add(StatRow(self.axis, "all_reduce", "none", "one rank", calls=1, raw_bytes=nbytes))

    def add_let_through(self, nbytes: int, sent: int, why: str) -> None:
        """Count a bucket that went as DDP sends it without a hook.

        Args:
            nbytes: bytes of the bucket.
            sent: bytes that this rank sent, where nothing else counts them.
            why: reason.
        """
        row = StatRow(self.axis, "all_reduce", "none", why, calls=1, raw_bytes=nbytes)
        row.plain_bytes = row.wire_bytes = sent
        self._add(row)

    def add_operation(self, call: StatRow, pieces: Sequence[Piece], dtype: DType, ranks: int) -> None:
        """Count an operation that has carried ``pieces``, each as one.

        Args:
            call: statistics of the operation, which are shared out by elements.
            pieces: at least one piece.
            dtype: dtype of the gradients.
            ranks: number of ranks.
        """
        elements, itemsize = 0, dtype.itemsize
        for piece in pieces:
            elements += piece.size
        with self._lock:
            for piece in pieces:
                share = piece.size / elements if elements else 1 / len(pieces)
                nbytes = piece.size * itemsize
                codec, reason = piece.kind
                key = (self.axis, "all_reduce", codec, reason + self.apart)
                row = self._rows.get(key)
                if row is None:
                    row = self._rows[key] = StatRow(*key)
                row.calls += 1
                row.raw_bytes += nbytes
                row.plain_bytes += allreduce_bytes(nbytes, ranks)
                row.wire_bytes += round(call.wire_bytes * share)
                row.shared_bytes += round(call.shared_bytes * share)
                row.between_bytes += round(call.between_bytes * share)
                row.encode_seconds += call.encode_seconds * share
                row.wire_seconds += call.wire_seconds * share
                row.decode_seconds += call.decode_seconds * share

    def _add(self, row: StatRow) -> None:
        with self._lock:
            self._rows.setdefault(row.key, StatRow(*row.key)).add(row)
