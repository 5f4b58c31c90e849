"""Count a hook's statistics, by axis, codec and reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hybridcomp import trace
from hybridcomp.collectives.stats import Call, CallPart, StatRow, record, share_out
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
        self._add_and_trace(StatRow(self.axis, "all_reduce", "none", "one rank", calls=1, raw_bytes=nbytes))

    def add_let_through(self, nbytes: int, sent: int, why: str) -> None:
        """Count a bucket that went as DDP sends it without a hook.

        Args:
            nbytes: bytes of the bucket.
            sent: bytes that this rank sent, where nothing else counts them.
            why: reason.
        """
        row = StatRow(self.axis, "all_reduce", "none", why, calls=1, raw_bytes=nbytes)
        row.plain_bytes = row.wire_bytes = sent
        self._add_and_trace(row)

    def kinds(self, pieces: Sequence[Piece]) -> list[CallPart]:
        """Return the kinds of pieces that one operation carries."""
        found: dict[tuple[str, str], list[int]] = {}
        for piece in pieces:
            counts = found.setdefault(piece.kind, [0, 0])
            counts[0] += 1
            counts[1] += piece.size
        kinds = []
        for (codec, reason), (calls, elements) in found.items():
            kinds.append(CallPart(codec, reason + self.apart, calls, elements))
        return kinds

    def add_operation(self, call: Call) -> None:
        """Count an operation that has ended, each of its kinds as one; they name its pieces."""
        for row in share_out(call, call.kinds):
            row.axis = self.axis
            self._add(row)

    def _add_and_trace(self, row: StatRow) -> None:
        if trace.recorder is not None:
            now = time.perf_counter()
            record(trace.recorder, row, now, now)
        self._add(row)

    def _add(self, row: StatRow) -> None:
        key = row.key
        with self._lock:
            total = self._rows.get(key)
            if total is None:
                total = self._rows[key] = StatRow(*key)
            total.add(row)
