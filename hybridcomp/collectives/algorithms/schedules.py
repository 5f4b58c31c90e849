"""Choose and build the schedule of an operation, as callers ask for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.collectives.algorithms.selection import OPERATIONS, Chooser
from hybridcomp.policy import Choice
from hybridcomp.schedules import registry
from hybridcomp.schedules.layout import layout
from hybridcomp.schedules.placement import placed
from hybridcomp.schedules.prepared import Prepared, prepare
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.shards import CHUNK_BYTES
from hybridcomp.schedules.topology import Topology

_MOST = 1024  # schedules that are not built again
_UNCUT = 1 << 62  # bytes of a chunk

Extents = tuple[tuple[int, int], ...]


class OperationKey(NamedTuple):
    """The key under which the program of an operation on one rank is cached.

    Attributes:
        kind: of :data:`~hybridcomp.schedules.registry.ALGORITHMS`.
        codec: of the messages.
        compresses: messages are encoded, and not the elements as they are.
        dtype: of the caller's elements.
        counts: as of :class:`~hybridcomp.schedules.schedule.Operation`; a rank may say 0 where it has no part. Of an
            all-to-all they follow from the two below.
        reduction: of a reduction: ``"sum"``, ``"avg"``, or ``""`` for all that the engine does not do.
        feedback: the form of its memory; None if it has none.
        root: of operations that have one.
        fold: of an all-reduce of integers as they are, which of
            :data:`~hybridcomp.codecs.linear.base.FOLDS` it is; ``""`` for all else.
        algorithm: that its policy names, used wherever it can be; None to choose.
        sends, receives: where the parts of the rank's buffers lie, if they are parts of any size: the chunks of such
            operations are not chosen, since ranks may not know each other's sizes.
    """

    kind: str
    codec: Codec
    compresses: bool
    dtype: DType
    counts: tuple[int, ...]
    reduction: str = "sum"
    feedback: str | None = None
    root: int = 0
    fold: str = ""
    algorithm: str | None = None
    sends: Extents | None = None
    receives: Extents | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        choice: Choice,
        dtype: DType,
        counts: tuple[int, ...],
        reduction: str = "sum",
        **more: Any,
    ) -> OperationKey:
        """Make the key of an operation with a policy's choice."""
        named = choice.algorithm
        return cls(kind, choice.codec, choice.encodes, dtype, counts, reduction, algorithm=named, **more)


class Schedules:
    """The schedules of one rank of a communicator.

    Args:
        topology, rank: of the communicator.
        chooser: of algorithms; None is always the first one, without chunks.
    """

    def __init__(self, topology: Topology, rank: int, chooser: Chooser | None) -> None:
        self._topology = topology
        self._rank = rank
        self._chooser = chooser
        self._prepared: dict[tuple[Any, ...], Prepared] = {}

    def find(self, key: OperationKey, algorithm: str | None = None) -> Prepared:
        """Return the schedule of an operation that is not the engine's.

        Args:
            key: the operation, whose messages are encoded.
            algorithm: the caller's; None to choose.

        Raises:
            ValueError: the algorithm cannot be used here.
        """
        entry = (key, *self.choose(key, algorithm, engine=False))
        found = self._prepared.get(entry)
        if found is None:
            if len(self._prepared) >= _MOST:
                self._prepared.clear()
            schedule, _ = self.build(*entry)
            found = self._prepared[entry] = prepare(schedule)
        return found

    def choose(self, key: OperationKey, algorithm: str | None = None, *, engine: bool) -> tuple[str, int]:
        """Choose the algorithm of an operation, and the uncompressed bytes of its chunks.

        Sizes that are the same on all ranks decide; else it is always the first algorithm.

        Args:
            key: the operation.
            algorithm: the caller's, for what is compressed; None to choose.
            engine: whether the compiled engine is to run it.

        Raises:
            ValueError: the algorithm cannot be used here.
        """
        if self._chooser is None:
            return "direct", _UNCUT
        if key.kind not in OPERATIONS or key.sends is not None or key.receives is not None:
            return "direct", CHUNK_BYTES
        chosen = self._chooser.choose(
            key.kind,
            sum(key.counts) * key.dtype.itemsize,
            key.dtype,
            key.codec,
            key.feedback,
            algorithm if key.compresses else None,
            key.algorithm,
            engine=engine,
        )
        return chosen.algorithm.name, chosen.chunk_bytes

    def build(self, key: OperationKey, algorithm: str, chunk: int) -> tuple[Schedule, list[int]]:
        """Build the schedule of an operation; return it with the elements of its send and receive buffers."""
        operation = Operation(
            key.kind,
            self._counts(key),
            key.dtype.itemsize,
            plain=not key.compresses,
            exact=key.codec.lossless,
            feedback=key.feedback is not None,
            mean=key.reduction == "avg",
            root=key.root,
            chunk_bytes=chunk,
        )
        schedule = registry.find(key.kind, algorithm).build(operation, self._topology, self._rank)
        room = layout(operation, len(self._topology.hosts), self._rank)
        sizes = [room.send, room.recv]
        for at, (buffer, extents) in enumerate(((Buffer.SEND, key.sends), (Buffer.RECV, key.receives))):
            if extents is not None and sizes[at]:
                schedule = placed(schedule, buffer, extents)
                sizes[at] = max(start + n for start, n in extents)
        return schedule, sizes

    def _counts(self, key: OperationKey) -> tuple[int, ...]:
        if key.kind != "all_to_all":
            return key.counts
        assert key.sends is not None
        assert key.receives is not None
        ranks = len(self._topology.hosts)
        counts = [0] * (ranks * ranks)  # a rank knows of its own parts alone
        counts[self._rank :: ranks] = [n for _, n in key.receives]
        counts[self._rank * ranks : (self._rank + 1) * ranks] = [n for _, n in key.sends]
        return tuple(counts)
