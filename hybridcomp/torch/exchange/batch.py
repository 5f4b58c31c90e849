"""Run operations that travel together: between two exchanges each goes on until it waits for a message.

All ranks do the same number of exchanges for a batch, whatever becomes of its operations: a rank on which one fails
tells the others why in the next exchange, so that none waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridcomp.arrays import ByteArray, DType
from hybridcomp.codecs import LinearCodec
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.transport.pools import Pool
from hybridcomp.errors import CollectiveTimeoutError, HybridcompError, MismatchError, RemoteError
from hybridcomp.policy import Choice
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.group import Exchange, ExchangeGroup
from hybridcomp.torch.exchange.lanes import Parcel, processes_of
from hybridcomp.torch.exchange.operation import ExchangeOperation
from hybridcomp.torch.exchange.packing import FAILED
from hybridcomp.torch.exchange.transport import BatchTransport

_PAUSE = 50e-6  # seconds between two looks at a device
_LOOK_SECONDS = 0.1  # a process closes its sockets a little before it has ended
_EXCHANGES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # in each of two levels
_SPARE = 1 << 10  # bytes that a rank may send beyond those waited for, to say why it has failed


def exchanges_of(op: str, topology: Topology) -> int:
    """Return the number of exchanges that an operation takes on ranks of these hosts, or the sum of a linear codec."""
    return (1 + topology.tiered) * _EXCHANGES[op]


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
    def of(
        cls,
        op: str,
        dtype: DType,
        parts: Iterable[tuple[Choice, int]],
        layout: Hashable,
        topology: Topology,
    ) -> BatchPlan:
        """Plan operations of one kind.

        Args:
            op: the kind.
            dtype: dtype of their elements.
            parts: choice and number of elements of each operation.
            layout: other values that the lengths of their messages depend on, such as shapes.
            topology: hosts of the ranks.
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
        return cls(key, sums * exchanges_of(op, topology), fixed, nbytes, most)


class Known(NamedTuple):
    """Sizes of an exchange's messages, which ranks know before it starts.

    Attributes:
        counts: bytes to each rank in the backend's buffer.
        sizes: bytes from each rank there.
        carried: whether the backend carries anything of it, between any two ranks; the same on all.
        heads: beginnings, with their tables, of what came from each rank in a device's memory; None where that is not
            known.
    """

    counts: Sequence[int]
    sizes: Sequence[int]
    carried: bool
    heads: Sequence[ByteArray] | None = None


class _Flying(NamedTuple):
    """An exchange under way.

    Attributes:
        carried: what the backend carries of it, if anything.
        number: its number among those of this host.
        entry: key of what is known of it, if anything is kept.
    """

    carried: Exchange | None
    number: int
    entry: Hashable


class Batch:
    """A batch of operations.

    One thread calls its methods, but for :meth:`add`, and :meth:`fail` before the batch starts, which are of the thread
    that makes it, and :attr:`in_flight`, which is of any.

    Attributes:
        transport: transport of its messages.
    """

    def __init__(
        self,
        plan: BatchPlan,
        group: ExchangeGroup,
        topology: Topology,
        known: dict[Hashable, Known],
        pool: Pool,
        timeout: float,
        compiled: Any = None,
    ) -> None:
        """Make a batch without operations.

        Args:
            plan: plan of the batch.
            group: group that moves its bytes.
            topology: topology of the group's ranks.
            known: what is known of exchanges, by plan and exchange; added to.
            pool: pool of buffers for messages.
            timeout: seconds that it waits for a device's own work.
            compiled: the compiled module's ``CarriedOperations``, for operations on host memory; None for none.
        """
        near = () if group.lanes is None else group.lanes.ranks
        self.transport = BatchTransport(topology, group.rank, pool, group.staging, near, compiled)
        self._plan, self._group, self._known = plan, group, known
        # Where the host does not wait for an exchange itself, the device's work has it within.
        self._timeout = timeout + group.timeout * self.transport.direct
        self._left = plan.exchanges if group.size > 1 else 0
        self._operations: list[ExchangeOperation] = []
        self._error: BaseException | None = None
        self._exchange: _Flying | None = None
        self._parcels: list[int] = []  # numbers of exchanges whose parcels are read
        self._nothing = [
            np.empty(0, np.uint8)
        ] * group.size  # what the backend carries in an exchange without it
        self._buffers: list[Any] = []  # buffers of its exchanges, in which messages lie

    def add(self, operation: ExchangeOperation) -> None:
        """Add an operation; the same ones in the same order on all ranks."""
        self._operations.append(operation)

    @property
    def in_flight(self) -> list[ExchangeOperation]:
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
        if self.transport.compiled is not None:
            self.transport.compiled.abandon()
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
            parcels = self._received(exchange)
            arrived = exchange.carried.wait() if exchange.carried is not None else self._nothing
        except Exception as error:
            self._break_off(error)
            return
        try:
            known = self._known.get(exchange.entry)
            heads = self.transport.deliver(arrived, parcels, None if known is None else known.heads)
            if known is not None and known.heads is None and self.transport.direct and exchange.carried:
                self._known[exchange.entry] = known._replace(heads=heads)
        except Exception as error:
            self.fail(error)
        self._run()
        self._next()

    def _run(self) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            while self._error is None:
                active, moved = [], False
                for operation in self._operations:
                    if not operation.ended:
                        active.append(operation)
                        moved = operation.step() or moved
                compiled = self.transport.compiled
                if (compiled is not None and compiled.run()) or moved:
                    deadline = time.monotonic() + self._timeout
                elif self.transport.joint.pending:
                    self.transport.joint.start()
                elif not self.transport.joint.settled:
                    self._pause(deadline)
                elif not self.transport.unwritten and all(operation.on_messages for operation in active):
                    return
                else:
                    self._pause(deadline)
        except Exception as error:
            self.fail(error)

    def _pause(self, deadline: float) -> None:
        """Leave the device some time."""
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"{self._what}: the device did not end its work within {self._timeout:g} s"
            )
        time.sleep(_PAUSE)

    def _next(self) -> None:
        """Start the next exchange, if there is one."""
        if not self._left:
            late = [operation for operation in self._operations if not operation.ended]
            if late:
                self.fail(HybridcompError(f"{late[0].what} waits for a message after its last exchange"))
            if self._error is None:
                for buffer in self._buffers:
                    self.transport.staging.give(buffer)
                self.transport.close()
            self._release()
            return
        try:
            self._exchange = self._started()
            self._left -= 1
        except Exception as error:
            self._break_off(error)

    @property
    def _what(self) -> str:
        """Return the name of the first operation that has not ended, for error messages."""
        late = self.in_flight or self._operations
        return late[0].what if late else f"an exchange without operations, rank {self._group.rank}"

    def _received(self, exchange: _Flying) -> dict[int, Parcel]:
        """Wait for the messages of this host's ranks."""
        if self._group.lanes is None:
            return {}
        return self._group.lanes.receive(exchange.number, self._what, self.transport.compiled)

    def _release(self) -> None:
        if self._group.lanes is not None:
            for number in self._parcels:
                self._group.lanes.release(number)
            self._parcels.clear()

    def _started(self) -> _Flying:
        transport, entry = self.transport, (self._plan.key, self._left)
        transport.collect()
        counts = transport.counts()
        known = self._known.get(entry)
        if known is None:
            known = self._agreed(counts, entry)
        elif self._error is None and list(known.counts) != counts:
            self.fail(
                HybridcompError(f"messages of {counts} bytes to each rank, where {known.counts} were before")
            )
        number = self._handed_over()
        carried = self._carried(list(known.counts), list(known.sizes)) if known.carried else None
        if carried is None:
            self._pack(np.empty(0, np.uint8), list(known.counts))
        return _Flying(carried, number, entry)

    def _handed_over(self) -> int:
        """Hand this host's ranks their messages; return the exchange's number among theirs."""
        lanes = self._group.lanes
        if lanes is None:
            return 0
        if self._error is None:
            parcels = self.transport.parcels()
        else:
            said = np.frombuffer(_told(self._error).encode()[:_SPARE], np.uint8)
            parcels = {rank: [(FAILED, said)] for rank in lanes.ranks}
        number = lanes.send(parcels, self._what, self.transport.compiled)
        self._parcels.append(number)
        return number

    def _carried(self, counts: list[int], sizes: list[int]) -> Exchange:
        """Start what the backend carries of an exchange."""
        transport = self.transport
        send = transport.staging.room(sum(counts))
        recv = None if transport.direct else transport.joint.room(sum(sizes))
        self._buffers.append(send)
        if recv is None:
            recv = transport.staging.room(sum(sizes))
            self._buffers.append(recv)
        self._pack(send, counts)
        return self._group.start(send, counts, recv, sizes)

    def _pack(self, out: Any, counts: list[int]) -> None:
        if self._error is None:
            self.transport.pack(out, counts)
        else:
            self.transport.pack_failure(_told(self._error), counts, out)

    def _agreed(self, counts: list[int], entry: Hashable) -> Known:
        """Exchange the sizes of messages; keep them where they are the same each time."""
        group, near = self._group, self.transport.near
        if self._error is not None:
            counts = [0 if rank in near or rank == group.rank else _SPARE for rank in range(group.size)]
        said = group.sizes(counts, failed=self._error is not None, carried=any(counts))
        for rank, (n, waited) in enumerate(zip(said.nbytes, self.transport.rooms(), strict=True)):
            # A rank that has failed may not wait yet for all that the others send.
            room = max(waited, _SPARE) if self._error is None else self._plan.most_bytes
            if not 0 <= n <= room:
                raise MismatchError(
                    f"rank {rank} sends rank {group.rank} {n} bytes, which has room for {room}"
                )
        known = Known(counts, said.nbytes, said.carried)
        if self._plan.fixed and not said.failed and self._error is None:
            self._known[entry] = known
        return known

    def _break_off(self, error: BaseException) -> None:
        """End without the exchanges that are left: the process group itself has failed."""
        if isinstance(error, RuntimeError) and not isinstance(error, HybridcompError):
            error = self._of_the_backend(error)
        self._exchange, self._left = None, 0
        self.fail(error)
        if self._group.lanes is not None:
            self._group.lanes.leave(error)
        self._release()

    def _of_the_backend(self, error: RuntimeError) -> RemoteError:
        """Return an error of the backend, which knows neither operations nor ranks, with what is known of them."""
        ended = [] if self._group.lanes is None else self._group.lanes.ended(_LOOK_SECONDS)
        known = f" ({processes_of(ended)} of this host ended)" if ended else ""
        named = RemoteError(f"{self._what}: the backend broke off an exchange{known}: {error}")
        named.__cause__ = error
        return named


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
