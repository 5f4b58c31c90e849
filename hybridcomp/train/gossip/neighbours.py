"""Exchange a message with each neighbour in a graph, over a communicator, and count what that took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.stats import Call, StatRow, StatTable
from hybridcomp.errors import CollectiveTimeoutError, MismatchError
from hybridcomp.train.gossip.graph import Graph

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

HEADER = 8
"""Bytes at the beginning of a message, which this module writes: the number of the step."""

_REASON = "asked for in the call"
_TAG = 1


class Neighbours:
    """The neighbours of this rank, with whom it exchanges messages.

    It is a member of torch's registry of statistics: its rows count the bytes that this rank sends, and beside them
    those of the same exchange uncompressed.

    Attributes:
        comm: of all ranks of the graph.
        graph: of them.
        rank: of this process.
        weights: of each neighbour, in order.
        op: what the statistics call it.
        label: of the statistics.
        table: the statistics.
    """

    def __init__(self, comm: Communicator, graph: Graph, op: str = "gossip") -> None:
        """Begin with nothing sent.

        Args:
            comm: used by nobody else; its policy is none.
            graph: of its ranks.
            op: what the statistics call it.
        """
        self.comm = comm
        self.graph = graph
        self.rank = comm.rank
        self.weights = graph.weights(comm.rank)
        self.op = op
        self.label = f"{op}:{comm.axis}"
        self.table = StatTable()
        self._inboxes: dict[int, ByteArray] = {}

    def begin(self, codec: str, nbytes: int) -> Call:
        """Begin to count an exchange; :meth:`end` ends it.

        Args:
            codec: for the statistics; ``none`` where nothing is compressed.
            nbytes: of this rank's parameters, which would go to every neighbour uncompressed.
        """
        call = Call(self.comm.axis, self.op, codec, _REASON, nbytes, nbytes * len(self.weights))
        call.starts(time.perf_counter())  # the trace has its messages
        return call

    def end(self, call: Call) -> None:
        """Count an exchange that is over."""
        self.table.add(call)

    def exchange(
        self, step: int, messages: Mapping[int, ByteArray], room: int | Mapping[int, int], call: Call
    ) -> dict[int, ByteArray]:
        """Send a message to each neighbour, and receive one of each.

        Args:
            step: that all are at.
            messages: by neighbour, 1-D uint8, of which the first :data:`HEADER` bytes are this method's.
            room: bytes that a neighbour's message has at most, without the header.
            call: that counts the bytes.

        Returns:
            The messages by neighbour, without headers, and with whatever bytes follow up to ``room``. They are valid
            until the next exchange.

        Raises:
            CollectiveTimeoutError: a neighbour's message did not come in time; names it and the step.
            MismatchError: a neighbour is at another step.
        """
        inboxes = {o: self._inbox(o, room if isinstance(room, int) else room[o]) for o in self.weights}
        requests = [(other, self.comm.Irecv(inbox, other, _TAG)) for other, inbox in inboxes.items()]
        for other, message in messages.items():
            message[:HEADER].view(np.int64)[0] = step
            requests.append((other, self.comm.Isend(message, other, _TAG)))
            call.wire_bytes += message.size
        for other, request in requests:
            try:
                request.wait()
            except CollectiveTimeoutError as late:
                raise CollectiveTimeoutError(
                    f"{self.op} of step {step} between ranks {self.rank} and {other}: {late}"
                ) from None
        for other, inbox in inboxes.items():
            theirs = int(inbox[:HEADER].view(np.int64)[0])
            if theirs != step:
                raise MismatchError(
                    f"{self.op} on axis {self.comm.axis!r}: rank {self.rank} is at step {step}, and rank {other} "
                    f"at step {theirs}"
                )
        return {other: inbox[HEADER:] for other, inbox in inboxes.items()}

    def _inbox(self, other: int, room: int) -> ByteArray:
        if other not in self._inboxes or self._inboxes[other].size != HEADER + room:
            self._inboxes[other] = np.empty(HEADER + room, np.uint8)
        return self._inboxes[other]

    # -- a member of the registry; memory is in the rules' states ------------------------------------

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self.table.rows()

    def memory(self) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        """Return nothing: whoever made the rule saves its state."""
        return {}

    def load_memory(self, arrays: object) -> None:
        """Do nothing: see :meth:`memory`."""

    def advance(self) -> None:
        """Do nothing: whoever uses it counts its steps."""
