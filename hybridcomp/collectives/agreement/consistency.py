"""Compare the operations that all ranks are about to run before data moves, for ``HYBRIDCOMP_DEBUG=detail``.

Every rank sends 256 bytes (the operation's number, a digest of its description, and as much of the description as
fits), and 16 for each rank (the elements that it exchanges with that rank, where ranks give their own counts), on a
separate communicator: the k-th operation of a rank meets the k-th of every other, whatever they are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp import variables
from hybridcomp.arrays import DType
from hybridcomp.collectives.execution.post_queue import PostQueue
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.failure.watchdog import inside_mpi
from hybridcomp.collectives.stats import Call
from hybridcomp.errors import MismatchError

_FIELDS = [("number", "<u8"), ("digest", "S16"), ("words", "S232")]

_OPS = (
    (MPI.SUM, "sum"),
    (MPI.PROD, "product"),
    (MPI.MAX, "max"),
    (MPI.MIN, "min"),
    (MPI.LAND, "logical and"),
    (MPI.LOR, "logical or"),
    (MPI.LXOR, "logical xor"),
    (MPI.BAND, "bitwise and"),
    (MPI.BOR, "bitwise or"),
    (MPI.BXOR, "bitwise xor"),
)


def in_detail() -> bool:
    """Tell whether this process is asked to compare operations.

    Raises:
        ConfigError: the variable's value is not a level.
    """
    return variables.DEBUG.read() == "detail"


def described(call: Call) -> str:
    """Describe in words the properties of an operation that must be alike on all ranks."""
    words = [call.op, f"codec {call.codec}"]
    words += [f"{name} {_word(value)}" for name, value in call.about.items() if value is not None]
    if call.memory == "device":
        words.append("on a device")
    return ", ".join(words)


def _word(value: Any) -> str:
    if isinstance(value, DType):
        return value.label
    if isinstance(value, MPI.Op):
        return next((name for op, name in _OPS if op == value), "of the user's")
    return str(value)


class Comparison:
    """Comparison of one communicator's operations, on a communicator of its own."""

    def __init__(self, comm: MPI.Comm) -> None:
        """Compare on ``comm``, which nothing else uses."""
        self.comm = comm
        each = (comm.Get_size(),)
        self._record = np.dtype([*_FIELDS, ("sends", "<i8", each), ("receives", "<i8", each)])
        self._post_queue = PostQueue()

    def before(
        self,
        steps: Steps,
        number: int,
        what: str,
        words: str,
        exchanged: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Steps:
        """Run an operation's ``steps``, begun in program order as ever, once all ranks are about to run the same one.

        Args:
            steps: steps of the operation.
            number: sequence number of the operation.
            what: name of the operation in error messages.
            words: description of the operation, which must be the same on all ranks.
            exchanged: numbers of elements that this rank sends to each rank and receives from each, if they may differ.

        Raises:
            MismatchError: descriptions differ; names the ranks in the minority, and both sides. Or a rank sends another
                number of elements than its receiver takes. Raised on all ranks.
        """
        record = np.zeros(1, self._record)
        raw = words.encode()
        record["number"], record["words"] = number, raw[:232]
        record["digest"] = hashlib.blake2b(raw, digest_size=8).hexdigest().encode()
        if exchanged is not None:
            record["sends"], record["receives"] = exchanged
        records = np.empty(self.comm.Get_size(), self._record)
        with self._post_queue.take().held() as ticket:
            with inside_mpi():
                request = self.comm.Iallgather([record, MPI.BYTE], [records, MPI.BYTE])
            yield Pending([request], [-1], events=[ticket])
            with ticket.posting():
                compare(records, what)
                compare_counts(records, what)
                first = next(steps, None)
        if first is not None:
            yield first
            yield from steps


def compare(records: np.ndarray[Any, Any], what: str) -> None:
    """Raise MismatchError unless all ranks' records are alike."""
    sides = [(int(r["number"]), bytes(r["digest"]), bytes(r["words"])) for r in records]
    if len(set(sides)) == 1:
        return
    common = Counter(sides).most_common(1)[0][0]  # of several equally common ones, the lowest rank's
    usual = sides.index(common)
    differing = [rank for rank, side in enumerate(sides) if side != common]
    raise _on_all_ranks(
        f"{what}: rank {', '.join(map(str, differing))} differs: rank {differing[0]} started "
        f"{_told(records[differing[0]])}; rank {usual} started {_told(records[usual])}"
    )


def compare_counts(records: np.ndarray[Any, Any], what: str) -> None:
    """Raise MismatchError unless every rank receives from each other as many elements as that one sends it."""
    sends, receives = records["sends"], records["receives"].T
    differing = np.argwhere(sends != receives)
    if differing.size:
        source, target = differing[0]
        raise _on_all_ranks(
            f"{what}: rank {source} sends {sends[source, target]} elements to rank {target}, which receives "
            f"{receives[source, target]} from it"
        )


def _on_all_ranks(text: str) -> MismatchError:
    error = MismatchError(text)
    error.everywhere = True
    return error


def _told(record: Any) -> str:
    text = bytes(record["words"]).rstrip(b"\0").decode(errors="replace")
    words = "".join(c if c.isprintable() else "?" for c in text)
    return f"{words!r} as its number {record['number']}"
