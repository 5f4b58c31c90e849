"""Run operations that travel together: between two exchanges each goes on until it waits for a message.

All ranks do the same number of exchanges for a batch, whatever becomes of its operations: a rank on which one fails
tells the others why in the next exchange, so that none waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from hybridcomp.arrays import ByteArray, DType
from hybridcomp.codecs import LinearCodec
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.errors import CollectiveTimeoutError, HybridcompError, MismatchError
from hybridcomp.policy import Choice
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.group import Exchange, ExchangeGroup
from hybridcomp.torch.exchange.operation import Operation
from hybridcomp.torch.exchange.transport import BatchTransport

_PAUSE = 50e-6  # seconds between two looks at a device
_EXCHANGES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
_SPARE = 1 << 10  # bytes that a rank may send beyond those waited for, to say why it has failed


class BatchPlan(NamedTuple):
    """The plan of a batch, which all ranks know before it starts.

    Attributes:
        key: key that batches with the same sizes of messages share, where those are ``fixed``.
        exchanges: number of exchanges that it takes.
        fixed: whether its messages are as long each time.
        nbytes: bytes of its results.
        most_bytes: most bytes that one rank sends another in an exchange.
    """

    key: Hashable
    exchanges: int
    fixed: bool
    nbytes: int
    most_bytes: int

    @classmethod
    def of(cls, op: str, dtype: DType, parts: Iterable[tuple[Choice, int]], layout: Hashable) -> BatchPlan:
        """Plan operations of one kind.

        Args:
            op: the kind.
            dtype: dtype of their elements.
            parts: choice and number of elements of each operation.
            layout: other values that the lengths of their messages depend on, such as shapes.
        """
        known = list(parts)
        linear = [choice.codec for choice, _ in known if isinstance(choice.codec, LinearCodec)]
        sums = max((codec.sums for codec in linear), default=1)
        fixed = all(
            choice.codec.fixed_sums if isinstance(choice.codec, LinearCodec) else choice.codec.fixed_size
            for choice, _ in known
        )
        key = (op, dtype, layout, *((choice.codec.spec, choice.feedback, n) for choice, n in known))
        most = sum(2 * NONE.bound(n, dtype.accumulator) + _SPARE for choice, n in known)
        nbytes = sum(n for _, n in known) * dtype.itemsize
        return cls(key, sums * _EXCHANGES[op], fixed, nbytes, most)


class Batch:
    """A batch of operations; every method but :meth:`add` is called by one thread.

    Attributes:
        transport: transport of its messages.
    """

    def __init__(
        self,
        plan: BatchPlan,
        group: ExchangeGroup,
        topology: Topology,
        known: dict[Hashable, tuple[Sequence[int], Sequence[int]]],
        pool: Pool,
        timeout: float,
    ) -> None:
        """Make a batch without operations.

        Args:
            plan: plan of the batch.
            group: group that moves its bytes.
            topology: topology of the group's ranks.
            known: bytes to and from each rank, by plan and exchange; added to.
            pool: pool of buffers for messages.
            timeout: seconds that it waits for a device.
        """
        self.transport = BatchTransport(topology, group.rank, pool)
        self._plan, self._group, self._known, self._timeout = plan, group, known, timeout
        self._left = plan.exchanges if group.size > 1 else 0
        self._operations: list[Operation] = []
        self._error: BaseException | None = None
        self._exchange: Exchange | None = None
        self._buffers: list[ByteArray] = []  # buffers of its exchanges, in which messages lie

    def add(self, operation: Operation) -> None:
        """Add an operation; the same ones in the same order on all ranks."""
        self._operations.append(operation)

    @property
    def in_flight(self) -> list[Operation]:
        """Return its operations that have not ended; may be called by any thread."""
        return [operation for operation in self._operations if not operation.ended]

    @property
    def ended(self) -> bool:
        """Tell whether no exchange is under way, or follows."""
        return self._exchange is None and not self._left

    @property
    def failed(self) -> bool:
        """Tell whether an operation has failed here or on another rank."""
        return self._error is not None

    def fail(self, error: BaseException) -> None:
        """End all operations that have not ended, with an error; the other ranks are told in the exchanges left."""
        self._error = self._error or error
        for operation in self._operations:
            operation.fail(error)

    def start(self) -> None:
        """Run the operations until all wait for messages, and start the first exchange."""
        self._run()
        self._next()

    def advance(self) -> None:
        """Wait for the exchange under way, run the operations again, and start the next exchange."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        try:
            arrived = exchange.wait()
        except Exception as error:
            self._break_off(error)
            return
        try:
            for rank, data in enumerate(arrived):
                self.transport.deliver(rank, data)
        except Exception as error:
            self.fail(error)
        self._run()
        self._next()

    def _run(self) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            while self._error is None:
                active = [operation for operation in self._operations if not operation.ended]
                moved = [operation.step() for operation in active]
                if any(moved):
                    deadline = time.monotonic() + self._timeout
                elif not self.transport.unwritten and all(operation.on_messages for operation in active):
                    return
                elif time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"{active[0].what}: the device did not end its work within {self._timeout:g} s"
                    )
                else:
                    time.sleep(_PAUSE)
        except Exception as error:
            self.fail(error)

    def _next(self) -> None:
        """Start the next exchange, if there is one."""
        if not self._left:
            late = [operation for operation in self._operations if not operation.ended]
            if late:
                self.fail(HybridcompError(f"{late[0].what} waits for a message after its last exchange"))
            if self._error is None:
                for buffer in self._buffers:
                    self.transport.give(buffer)
            return
        try:
            self._exchange = self._started()
            self._left -= 1
        except Exception as error:
            self._break_off(error)

    def _started(self) -> Exchange:
        transport, entry = self.transport, (self._plan.key, self._left)
        counts = transport.counts()
        known = self._known.get(entry)
        if known is None:
            counts, sizes = self._agreed(counts, entry)
        else:
            if self._error is None and list(known[0]) != counts:
                self.fail(
                    HybridcompError(f"messages of {counts} bytes to each rank, where {known[0]} were before")
                )
            counts, sizes = list(known[0]), list(known[1])
        send, recv = transport.take(sum(counts)), transport.take(sum(sizes))
        self._buffers += [send, recv]
        if self._error is None:
            transport.pack(send)
        else:
            transport.pack_failure(f"{type(self._error).__name__}: {self._error}", counts, send)
        return self._group.start(send, counts, recv, sizes)

    def _agreed(self, counts: list[int], entry: Hashable) -> tuple[list[int], list[int]]:
        """Exchange the sizes of messages; keep them where they are the same each time."""
        group = self._group
        if self._error is not None:
            counts = [_SPARE if rank != group.rank else 0 for rank in range(group.size)]
        said = group.sizes(counts, failed=self._error is not None)
        for rank, (n, waited) in enumerate(zip(said.nbytes, self.transport.rooms(), strict=True)):
            # A rank that has failed may not wait yet for all that the others send.
            room = max(waited, _SPARE) if self._error is None else self._plan.most_bytes
            if not 0 <= n <= room:
                raise MismatchError(
                    f"rank {rank} sends rank {group.rank} {n} bytes, which has room for {room}"
                )
        if self._plan.fixed and not said.failed and self._error is None:
            self._known[entry] = counts, said.nbytes
        return counts, said.nbytes

    def _break_off(self, error: BaseException) -> None:
        """End without the exchanges that are left: the process group itself has failed."""
        self._exchange, self._left = None, 0
        self.fail(error)
