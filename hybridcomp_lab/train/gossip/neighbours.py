"""Exchange a message with each neighbour in a graph, over a communicator, and count its bytes and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.stats import Call, StatRow, StatTable
from hybridcomp.errors import CollectiveTimeoutError, MismatchError
from hybridcomp_lab.train.gossip.graph import Graph

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

HEADER = 8
"""Bytes of a message's header, which this module writes: the number of the step."""

_REASON = "asked for in the call"
_TAG = 1


class Neighbours:
    """Neighbours of this rank, with which it exchanges messages.

    It is a member of torch's registry of statistics: its rows count the bytes that this rank sends, and beside them
    those of the same exchange uncompressed.

    Attributes:
        comm: communicator of all ranks of the graph.
        graph: graph of the ranks.
        rank: rank of this process.
        weights: weight of each neighbour, in order.
        op: name of the operation in the statistics.
        label: label of the statistics.
        table: statistics of the exchanges.
    """

    def __init__(self, comm: Communicator, graph: Graph, op: str = "gossip") -> None:
        """Start without any exchange.

        Args:
            comm: communicator that nobody else uses, with the policy none.
            graph: graph of its ranks.
            op: name of the operation in the statistics.
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
            codec: spec for the statistics; ``none`` where nothing is compressed.
            nbytes: bytes of this rank's parameters, which would go to every neighbour uncompressed.
        """
        call = Call(self.comm.axis, self.op, codec, _REASON, nbytes, nbytes * len(self.weights))
        call.starts(time.perf_counter())  # the trace has the exchange's messages
        return call

    def end(self, call: Call) -> None:
        """Count an exchange that is over."""
        self.table.add(call)

    def exchange(
        self, step: int, messages: Mapping[int, ByteArray], room: int | Mapping[int, int], call: Call
    ) -> dict[int, ByteArray]:
        """Send a message to each neighbour, and receive one from each.

        Args:
            step: step that all ranks are at.
            messages: messages by neighbour, 1-D uint8; this method writes their first :data:`HEADER` bytes.
            room: most bytes of a neighbour's message, without the header.
            call: call that counts the bytes.

        Returns:
            The messages by neighbour, without headers, and with arbitrary bytes after them up to ``room``. They are
            valid until the next exchange.

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
        """Return nothing: the owner of the rule saves its state."""
        return {}

    def load_memory(self, arrays: object) -> None:
        """Do nothing: see :meth:`memory`."""

    def advance(self) -> None:
        """Do nothing: the owner of the rule counts its steps."""
