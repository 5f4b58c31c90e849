"""All-reduce by a linear codec: ``powersgd``, ``randomblock``, ``lattice``, ``sketch``.

1. The codec gets this rank's data, corrected by an error-feedback memory, and says which array is to be reduced
   first.
2. Every such round is an exact all-reduce of this package: always in the same order, so that a small array's bits are
   the same whether it is summed alone or with the rounds of other arrays. Where a round has two arrays, which take
   separate operations, one is summed after the other: they would share the link.
   MPI does not sum integers either, though it could in any order: its own non-blocking collectives must be started in
   one order on all ranks, and with several operations in flight a second round starts whenever the first has ended
   here. (A caller that drives a reduction alone can use ``MPI.Allreduce``: see codecs/linear/base.py.)
3. The codec makes the result from the rounds' sums, which have the same bits on all ranks, and so has the result; the
   error-feedback memory keeps this rank's data minus the result.

For arrays in a device's memory the codec's kernels leave the rounds in pinned host memory, where they are summed as all
others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hybridcomp.arrays import Flat, as_dtype
from hybridcomp.codecs import LinearCodec
from hybridcomp.codecs.feedback.memories import PlainMemory
from hybridcomp.codecs.linear.base import Reduced, Round
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coalesced import Coalesced
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.execution.steps import Pending, Steps

# Function that sums an array in host memory over the ranks, in place. It gets a carrier for the array, the array, a
# key, an algorithm (None for the fastest), and the tags or numbers reserved for the messages.
SumArray = Callable[[Carrier, Flat, OperationKey, str | None, Any], Steps]


class Part(NamedTuple):
    """Array to sum over the ranks.

    Attributes:
        send, recv: buffers of the same dtype and count, maybe the same memory; the codec sees ``recv``'s shape.
        name: name of the parameter.
        memory: error-feedback memory from :meth:`.Carrier.memory`, which is updated; None for none.
    """

    send: Flat
    recv: Flat
    name: str | None
    memory: Any = None


def linear_allreduce(
    carrier: Carrier,
    parts: Sequence[Part],
    reserved: Iterator[Any],
    sum_array: SumArray,
    *,
    coalesced: int,
    mean: bool,
    step: int,
    warm: dict[str, Array],
) -> Steps:
    """Sum arrays over all ranks.

    Args:
        carrier: linear codec, transport and statistics.
        parts: arrays to sum, at least one, of one dtype.
        reserved: tags or numbers for the messages of each sum: one for each part and sum of the codec.
        sum_array: function that sums the array of a round.
        coalesced: bytes below which arrays of a round are summed in one operation.
        mean: whether to divide the sum by the number of ranks.
        step: training step; codecs that draw random numbers draw others in each step.
        warm: arrays that the codec keeps by name between calls.

    Raises:
        WireError, MismatchError: a peer's message is damaged or unexpected.
        ValueError: the codec cannot sum so many ranks.
    """
    mailbox = carrier.mailbox()
    reductions = [_Reduction(carrier, part, mean, step, warm) for part in parts]

    def summed(array: Array, op: str, algorithm: str | None) -> Steps:
        kind = as_dtype(array.dtype)
        fold = "" if kind.is_float else op
        key = OperationKey("all_reduce", NONE, False, kind, (array.size,), fold=fold)
        flat = Flat(array, kind, array.shape, True, False)
        own = Carrier(carrier.transport, NONE, kind, carrier.call)
        return sum_array(own, flat, key, algorithm, next(reserved))

    def summed_all(same: Sequence[Round]) -> Steps:
        for each in same:
            if each.ready is not None:
                yield Pending([], [], events=[each.ready])
        op, arrays = same[0].op, [each.array.reshape(-1) for each in same]
        small = [array for array in arrays if array.nbytes < coalesced]
        if len(small) > 1:
            together = Coalesced(small, carrier.transport.size)
            together.gather()
            yield from summed(together.values, op, "direct")
            together.write_back()
        elif small:
            yield from summed(small[0], op, "direct")
        for array in arrays:
            if array.nbytes >= coalesced:
                yield from summed(array, op, None)

    while True:
        rounds = [each for each in [one.next_round() for one in reductions] if each is not None]
        if len(rounds) < len(reductions):  # none left: a codec has equally many for all arrays of a dtype
            break
        for same in zip(*(each.together for each in rounds), strict=True):
            yield from summed_all(same)
    for one in reductions:
        one.end()
    yield from mailbox.finish()


class _Reduction:
    """Reduction of one array by a linear codec, round by round."""

    def __init__(self, carrier: Carrier, part: Part, mean: bool, step: int, warm: dict[str, Array]) -> None:
        t, codec, send, recv = carrier.transport, carrier.codec, part.send, part.recv
        assert isinstance(codec, LinearCodec)
        self._carrier, self._recv, self._memory = carrier, recv, part.memory
        given = send._replace(shape=recv.shape)
        if part.memory is not None:
            with carrier.call.encoding():
                given = carrier.corrected(given, part.memory, recv.data)
        self._given = given
        self._result: Reduced | None = None
        self._rounds = codec.reduction(
            given,
            ranks=t.size,
            rank=t.rank,
            mean=mean,
            own=part.memory is not None,
            step=step,
            warm=warm,
            name=part.name,
            queue=carrier.queue,
            residual=part.memory.error if type(part.memory) is PlainMemory else None,
        )

    def next_round(self) -> Round | None:
        """Return the next round; None once the result is here.

        The time before a round counts as encoding, the time before the result as decoding.
        """
        began, call = time.perf_counter(), self._carrier.call
        try:
            following = next(self._rounds)
            call.encoding().add(began, time.perf_counter())
            return following
        except StopIteration as end:
            self._result = end.value
            call.decoding().add(began, time.perf_counter())
            return None

    def end(self) -> None:
        """Write the result, and keep this rank's data minus the result, unless that is not finite."""
        while self._result is None:
            self.next_round()
        result, memory = self._result, self._memory
        with self._carrier.call.decoding():
            if memory is not None and result.own is not None:
                self._carrier.keep_lost(self._given, result.own, memory)
            if result.total is not self._recv.data:
                self._carrier.store(result.total, self._recv.data, 1)
