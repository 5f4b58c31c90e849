"""Start all-reduces that are encoded: of one array or of several, by linear codecs and by all others.

Nothing here needs MPI: whoever starts them decides what carries the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridcomp.arrays import Flat
from hybridcomp.codecs import LinearCodec
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.linear import Part, linear_allreduce
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.starting import Operands, OperationStarter, Started
from hybridcomp.collectives.stats import Call, allreduce_bytes
from hybridcomp.device import DeviceArray
from hybridcomp.policy import Choice, check_feedback


class Extent(Protocol):
    """A part of an array: its elements ``start`` to ``start + size``."""

    @property
    def name(self) -> str:
        """Return the name by which error feedback is kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that its codec sees."""

    @property
    def start(self) -> int:
        """Return the index of its first element."""

    @property
    def size(self) -> int:
        """Return the number of its elements."""


def allreduce_parts(
    comm: OperationStarter[Started],
    data: Flat,
    parts: Sequence[Extent],
    reduction: str,
    choice: Choice,
    step: int,
) -> Started | None:
    """Start one all-reduce of parts of an array, in place, each with the bits that it has alone.

    Args:
        comm: starts it.
        data: the array.
        parts: of it.
        reduction: ``"sum"`` or ``"avg"``.
        choice: what carries them.
        step: of training, for codecs that draw random numbers.

    Returns:
        The request; None where it takes an operation for each part: then nothing has been started.
    """
    codec, form = choice.codec, choice.feedback
    # A codec that is another one at each step of a memory may be another one for each part.
    drawn = form is not None and codec.at_step(0) is not codec and not codec.linear
    if drawn or isinstance(data.data, DeviceArray):
        return None
    counts = tuple(part.size for part in parts)
    nbytes = sum(counts) * data.dtype.itemsize
    names = ", ".join(part.name for part in parts)
    about = {"counts": counts, "dtype": data.dtype, "reduction": reduction, "name": names}

    def call() -> Call:
        return comm._call("all_reduce", choice, nbytes, allreduce_bytes(nbytes, comm.size), **about)

    if codec.linear:
        arrays = [_part(data, part) for part in parts]
        return allreduce_linear(comm, choice, call(), arrays, reduction == "avg", step, [])
    key = OperationKey.of("all_reduce", choice, data.dtype, counts, reduction, feedback=form)
    feedback: Callable[[Carrier], Any] = at_step(step)
    if form is not None:
        check_feedback("all_reduce", codec, form)
        keys = [(comm.axis, part.name) for part in parts]
        feedback = lambda carrier: comm.feedback.begin_joined(keys, counts, data.dtype, form)  # noqa: E731
    return comm._start_joined(key, [(part.start, part.size) for part in parts], call, data, feedback)


def allreduce_encoded(
    comm: OperationStarter[Started],
    operands: Operands,
    choice: Choice,
    call: Call,
    reduction: str,
    *,
    name: str | None,
    algorithm: str | None = None,
    step: int | None = None,
    framed: bool = False,
) -> Started:
    """Start an all-reduce of one array by an algorithm of ours.

    Args:
        comm: starts it.
        operands: the array, and room for the result: of one size and dtype; may be the same memory.
        choice: what carries it.
        call: statistics.
        reduction: ``"sum"`` or ``"avg"``.
        name: of the array; None for no memory.
        algorithm: the caller's; None to choose.
        step: of training: messages without a memory are of the codec of this step; None leaves the codec as it is.
        framed: messages are encoded by ``none``, too.
    """
    send, recv = operands.send, operands.recv
    assert send is not None
    assert recv is not None
    if choice.codec.linear:
        parts = [Part(send, recv, name)]
        return allreduce_linear(comm, choice, call, parts, reduction == "avg", step, operands.device)
    feedback, form = remembering(comm, "all_reduce", choice, name, recv.size)
    if feedback is None and step is not None:
        feedback = at_step(step)
    key = OperationKey.of("all_reduce", choice, recv.dtype, (recv.size,), reduction, feedback=form)
    key = key._replace(compresses=key.compresses or framed)
    return comm._scheduled(key, call, operands, algorithm=algorithm, feedback=feedback)


def remembering(
    comm: OperationStarter[Started], op: str, choice: Choice, name: str | None, n: int
) -> tuple[Callable[[Carrier], Any] | None, str | None]:
    """Return what sets a data path's memory and its step's codec, and the memory's form; None without feedback."""
    form = choice.feedback
    if form is None or name is None:
        return None, None
    check_feedback(op, choice.codec, form)
    key = (comm.axis, name)
    return lambda carrier: carrier.remember(comm.feedback, key, n, form), form


def allreduce_linear(
    comm: OperationStarter[Started],
    choice: Choice,
    call: Call,
    arrays: Sequence[Part],
    mean: bool,
    step: int | None,
    device: Sequence[DeviceArray],
) -> Started:
    """Start an all-reduce by a linear codec of one array, or of several in host memory."""
    codec, form = choice.codec, choice.feedback
    assert isinstance(codec, LinearCodec)
    reserved = [comm._reserve() for _ in range(codec.sums * len(arrays))]
    drawn = comm.step if step is None else step
    first = arrays[0]
    if form is not None and first.name is not None:
        check_feedback("all_reduce", codec, form)

    def memory(carrier: Carrier, part: Part) -> Any:
        if form is None or part.name is None:
            return None
        return carrier.memory(comm.feedback, (comm.axis, part.name), part.recv.size, form)

    def run(carrier: Carrier, send: Flat | None, recv: Flat | None, _: Any) -> Steps:
        here = arrays
        if device:  # these are there, or in a host's copy of it
            assert send is not None
            assert recv is not None
            here = [first._replace(send=send, recv=recv)]
        # In the operation: the other ranks are told if it fails.
        parts = [part._replace(memory=memory(carrier, part)) for part in here]
        return linear_allreduce(
            carrier,
            parts,
            iter(reserved),
            comm._sum_array,
            coalesced=comm._coalesced,
            mean=mean,
            step=drawn,
            warm=comm.warm,
        )

    return comm._carried(run, codec, call, Operands(first.send, first.recv, device))


def _part(data: Flat, part: Extent) -> Part:
    elements = data.data[part.start : part.start + part.size]
    flat = Flat(elements, data.dtype, part.shape, True, False)
    return Part(flat, flat, part.name)


def at_step(step: int) -> Callable[[Carrier], None]:
    """Return what gives a carrier its codec of a step of training, and no memory."""

    def choose(carrier: Carrier) -> None:
        carrier.codec = carrier.codec.at_step(step)

    return choose
