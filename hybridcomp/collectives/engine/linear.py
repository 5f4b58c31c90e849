"""All-reduce by a linear codec: ``powersgd``, ``randomblock``, ``lattice``, ``sketch``.

1. The codec is given this rank's data plus residual and says which array is to be reduced first.
2. Every such round is an exact all-reduce of our own, by the compiled engine where that is in use: always in the same
   order. Integers, which MPI could sum in any order, are not MPI's either: its own non-blocking collectives must be
   started in one order on all ranks, and with several operations in flight a second round starts whenever the first has
   ended here. (A caller who drives a reduction alone can use ``MPI.Allreduce``: see codecs/linear/base.py.)
3. The codec makes the result of what the rounds gave, which has the same bits on all ranks, and so has the result;
   the residual is what the result lacks of this rank's data.

Of a device's memory the codec's kernels leave the rounds in pinned host memory, where they are summed as all others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hybridcomp.arrays import Flat, as_dtype
from hybridcomp.codecs import LinearCodec
from hybridcomp.codecs.linear.base import FOLDS, Reduced, Reduction, Round
from hybridcomp.collectives.algorithms.allreduce import allreduce
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE, Array
from hybridcomp.collectives.engine.programs import OperationKey, Programs, running
from hybridcomp.collectives.execution.progress import Pending, Steps
from hybridcomp.collectives.stats import Call
from hybridcomp.native import kernels


def linear_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    numbers: Sequence[tuple[int, int, int]],
    programs: Programs | None,
    *,
    mean: bool,
    residual: Array | None,
    step: int,
    warm: dict[str, Array],
    name: str | None,
) -> Steps:
    """Sum ``send`` over all ranks into ``recv``.

    Args:
        carrier: a linear codec, transport and statistics.
        send, recv: the same dtype and count; the codec sees ``recv``'s shape.
        numbers: for each round that the codec may take, two tags, and the numbers reserved for a program.
        programs: of the engine, where it is in use.
        mean: divide the sum by the number of ranks.
        residual: error-feedback memory of the accumulator's dtype, updated in place; of host memory.
        step: of training; codecs that draw random numbers draw others.
        warm: what the codec keeps by name between calls.
        name: of the parameter.

    Raises:
        WireError, MismatchError: from a peer's message.
        ValueError: the codec cannot sum so many ranks.
    """
    t, codec, call = carrier.transport, carrier.codec, carrier.call
    assert isinstance(codec, LinearCodec)
    mailbox = carrier.mailbox()
    given = send._replace(shape=recv.shape)
    with call.encoding():
        if residual is not None:
            kind = send.dtype.accumulator
            # The result comes to the same place: no other pages are touched.
            in_place = send.dtype is kind and recv.data.flags.aligned
            corrected = recv.data if in_place else np.empty(send.size, kind.storage)
            kernels().feedback_add(send.data, send.dtype, residual, corrected, False)
            given = Flat(corrected, kind, recv.shape, True, False)
    rounds = codec.reduction(
        given,
        ranks=t.size,
        rank=t.rank,
        mean=mean,
        own=residual is not None,
        step=step,
        warm=warm,
        name=name,
        queue=carrier.queue,
        residual=residual,
    )
    reserved = iter(numbers)
    following = _advance(rounds, call)
    while isinstance(following, Round):
        if following.ready is not None:
            yield Pending([], [], events=[following.ready])
        kind = as_dtype(following.array.dtype)
        flat = Flat(following.array.reshape(-1), kind, following.array.shape, True, False)
        *tags, first = next(reserved)
        program = None
        if programs is not None and flat.size:
            fold = "" if kind.is_float else following.op
            key = OperationKey("all_reduce", NONE, False, kind, (flat.size,), fold=fold)
            program = programs.find(key)
        round_carrier = Carrier(t, NONE, kind, call)
        if program is None:
            add = None if kind.is_float else FOLDS[following.op]
            yield from allreduce(round_carrier, flat, flat, tags, fold=add)
        else:
            yield from running(program, first, flat, flat, round_carrier)
        following = _advance(rounds, call)
    result = following
    with call.decoding():
        if residual is not None and result.own is not None:
            lost = given.data - result.own
            if np.isfinite(lost).all():
                residual[:] = lost
        if result.total is not recv.data:
            carrier.store(result.total, recv.data, 1)
    yield from mailbox.finish()


def _advance(rounds: Reduction, call: Call) -> Round | Reduced:
    """Return the next round, or the result.

    The time before a round counts as encoding, the time before the result as decoding.
    """
    began = time.perf_counter()
    try:
        following: Round | Reduced = next(rounds)
        call.encoding().add(began, time.perf_counter())
    except StopIteration as end:
        following = end.value
        call.decoding().add(began, time.perf_counter())
    return following
