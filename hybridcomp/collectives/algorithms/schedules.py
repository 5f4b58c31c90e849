"""Choose and build the schedules of operations as callers ask for them."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, NamedTuple

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.collectives.algorithms.selection import Chooser, refusal
from hybridcomp.policy import Choice
from hybridcomp.schedules import registry
from hybridcomp.schedules.layout import REDUCTIONS, layout
from hybridcomp.schedules.placement import placed
from hybridcomp.schedules.prepared import Prepared, prepare
from hybridcomp.schedules.schedule import Buffer, Operation, Schedule
from hybridcomp.schedules.shards import CHUNK_BYTES
from hybridcomp.schedules.topology import Topology

_MOST = 1024  # schedules that are kept
_UNCUT = 1 << 62  # bytes of a chunk, more than any buffer has
_HIERARCHICAL = "hierarchical"

# Names of folds, as kernels/engine/fold.hpp numbers them.
FOLDS = ("", "sum", "max", "or", "min", "product", "max at", "min at")

KeyExtents = tuple[tuple[int, int], ...]


class OperationKey(NamedTuple):
    """Key under which the program of an operation on one rank is cached.

    Attributes:
        kind: kind of operation, a key of :data:`~hybridcomp.schedules.registry.ALGORITHMS`.
        codec: codec of the messages.
        compresses: whether messages are encoded, instead of the elements as they are.
        dtype: dtype of the caller's elements.
        counts: element counts, as in :class:`~hybridcomp.schedules.schedule.Operation`; a rank may say 0 where it has
            no part. For an all-to-all they follow from ``sends`` and ``receives``.
        reduction: kind of reduction: ``"sum"``, ``"avg"``, or ``""`` for all others, some of which are a ``fold``.
        feedback: form of the error feedback; None if the operation has none.
        root: root rank of operations that have one.
        fold: name in :data:`FOLDS` of an all-reduce of elements as they are,
            for all that codecs do not sum; ``""`` for all else.
        algorithm: algorithm that the policy names, used wherever it can be; None to choose.
        sends, receives: extents of the parts of the rank's buffers, if the parts may be of any size.
        least: bytes below which a part travels as it is: see :class:`~hybridcomp.schedules.schedule.Operation`.
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
    sends: KeyExtents | None = None
    receives: KeyExtents | None = None
    least: int = 0

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

    @property
    def shares(self) -> bool:
        """Tell whether the messages share a bound on the error of the result."""
        return bool(self.codec.bounds) and self.compresses and self.kind in REDUCTIONS


@functools.lru_cache(256)
def _sharing(codec: Codec, encodings: Fraction) -> Codec:
    return codec.sharing(encodings)


class Schedules:
    """Schedules of one rank of a communicator.

    Args:
        topology: topology of the communicator.
        rank: number of this rank in it.
        chooser: chooser of algorithms; None for two levels where hosts have several ranks and the operation can have
            them, else the first algorithm, without chunks.
    """

    def __init__(self, topology: Topology, rank: int, chooser: Chooser | None) -> None:
        self._topology = topology
        self._rank = rank
        self._chooser = chooser
        self._prepared: dict[tuple[Any, ...], Prepared] = {}

    def find(self, key: OperationKey, algorithm: str | None = None) -> tuple[Prepared, Codec]:
        """Return the schedule of an operation that the engine does not run, and the codec of its messages.

        Args:
            key: key of the operation, whose messages are encoded.
            algorithm: algorithm that the caller asks for; None to choose.

        Raises:
            ValueError: the algorithm cannot be used here.
        """
        entry = (key, *self.choose(key, algorithm))
        found = self._prepared.get(entry)
        if found is None:
            if len(self._prepared) >= _MOST:
                self._prepared.clear()
            schedule, _ = self.build(*entry)
            found = self._prepared[entry] = prepare(schedule)
        return found, self.codec(key, entry[1])

    def choose(self, key: OperationKey, algorithm: str | None = None) -> tuple[str, int]:
        """Choose the algorithm of an operation, and the uncompressed bytes of its chunks.

        The first algorithm is taken of operations that have one alone, and of those on parts of any size, unless they
        are to spare the network.

        Args:
            key: key of the operation.
            algorithm: algorithm that the caller asks for if the operation is compressed; None to choose.

        Raises:
            ValueError: the algorithm cannot be used here.
        """
        if self._chooser is None:
            return self._levelled(key), _UNCUT
        unlike = key.sends is not None or key.receives is not None
        if key.kind not in registry.SELECTABLE or (unlike and not self.spares_network(key)):
            return "direct", CHUNK_BYTES
        chosen = self._chooser.choose(
            key.kind,
            sum(key.counts) * key.dtype.itemsize,
            key.dtype,
            key.codec,
            key.feedback,
            algorithm if key.compresses else None,
            key.algorithm,
        )
        return chosen.algorithm.name, chosen.chunk_bytes

    def _levelled(self, key: OperationKey) -> str:
        """Return two levels, so that bytes leave a host once, or one, where the operation or the hosts want that."""
        levelled = registry.ALGORITHMS[key.kind].get(_HIERARCHICAL)
        if levelled is None or key.fold or refusal(levelled, self._topology, key.codec, key.feedback):
            return "direct"
        return _HIERARCHICAL

    def spares_network(self, key: OperationKey) -> bool:
        """Tell whether an operation is to go in two levels, if the engine runs it.

        Args:
            key: key of the operation, whose counts are the same on all ranks.
        """
        return self._chooser is not None and self._chooser.spares_network(
            key.kind, sum(key.counts) * key.dtype.itemsize, key.dtype, key.codec
        )

    def codec(self, key: OperationKey, algorithm: str) -> Codec:
        """Return the codec of an operation's messages by an algorithm: the key's, or one with a share of its bound."""
        if not key.shares:
            return key.codec
        promise = registry.find(key.kind, algorithm).promise
        return _sharing(key.codec, promise.encodings(self._topology, mean=key.reduction == "avg"))

    def build(self, key: OperationKey, algorithm: str, chunk: int) -> tuple[Schedule, list[int]]:
        """Build the schedule of an operation; return it with the element counts of its send and receive buffers."""
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
            least=key.least,
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
