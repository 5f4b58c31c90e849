"""Start encoded all-reduces of one array or of several, by linear codecs and by all others.

Nothing here needs MPI: the starter of the operations decides on the transport of the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridcomp.arrays import DType, Flat
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
    """Part of an array: its elements ``start`` to ``start + size``."""

    @property
    def name(self) -> str:
        """Return the name under which error feedback is kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the codec sees."""

    @property
    def start(self) -> int:
        """Return the index of the part's first element."""

    @property
    def size(self) -> int:
        """Return the number of the part's elements."""


class Together:
    """Parts of an array that one operation carries, of arrays alike, and what follows from the parts.

    Attributes:
        parts: the parts, at least one.
        counts: number of elements of each.
        extents: first element and number of elements of each.
        size: number of elements in all.
        names: their names, in words.
    """

    def __init__(self, parts: Sequence[Extent]) -> None:
        """Take the parts."""
        self.parts = parts
        self.counts = tuple(part.size for part in parts)
        self.extents = tuple((part.start, part.size) for part in parts)
        self.size = sum(self.counts)
        self.names = ", ".join(part.name for part in parts)
        self._starts: dict[tuple[Any, ...], Any] = {}

    def starting(
        self, comm: OperationStarter[Started], choice: Choice, dtype: DType, reduction: str
    ) -> Callable[..., Started] | None:
        """Find the program of one all-reduce of the parts, once: see :meth:`.OperationStarter.find_joined`."""
        asked = (id(comm), id(choice), dtype.label, reduction)
        found = self._starts.get(asked)
        if found is None:
            form = choice.feedback
            key = OperationKey.of("all_reduce", choice, dtype, self.counts, reduction, feedback=form)
            # What the ids are of is kept.
            found = self._starts[asked] = comm, choice, comm.find_joined(key, self.extents)
        start: Callable[..., Started] | None = found[2]
        return start


def allreduce_parts(
    comm: OperationStarter[Started],
    data: Flat,
    together: Together,
    reduction: str,
    choice: Choice,
    step: int,
) -> Started | None:
    """Start one all-reduce of parts of an array, in place; each part gets the same bits as in its own all-reduce.

    Args:
        comm: starter of the operation.
        data: the array.
        together: parts of the array.
        reduction: ``"sum"`` or ``"avg"``.
        choice: codec and form of feedback for the parts.
        step: training step, for codecs that draw random numbers.

    Returns:
        The request; None where each part needs its own operation: then nothing has been started.
    """
    codec, form = choice.codec, choice.feedback
    # A codec that differs between steps of a memory may differ between parts.
    drawn = form is not None and codec.at_step(0) is not codec and not codec.linear
    if drawn or isinstance(data.data, DeviceArray):
        return None
    if form is not None:
        check_feedback("all_reduce", codec, form)
    start = None if codec.linear else together.starting(comm, choice, data.dtype, reduction)
    if start is None and not codec.linear:
        return None
    nbytes = together.size * data.dtype.itemsize
    about = {
        "counts": together.counts,
        "dtype": data.dtype,
        "reduction": reduction,
        "name": together.names,
    }
    call = comm.new_call("all_reduce", choice, nbytes, allreduce_bytes(nbytes, comm.size), **about)
    call.carries = len(together.parts)
    if start is None:
        arrays = [_part(data, part) for part in together.parts]
        return allreduce_linear(comm, choice, call, arrays, reduction == "avg", step, [])
    feedback: Callable[[Carrier], Any] = at_step(step)
    if form is not None:
        keys = [(comm.axis, part.name) for part in together.parts]
        feedback = lambda carrier: comm.feedback.begin_joined(keys, together.counts, data.dtype, form)  # noqa: E731
    return start(call, Operands(data, data), feedback=feedback)


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
    """Start an all-reduce of one array by an algorithm of this package.

    Args:
        comm: starter of the operation.
        operands: the array, and room for the result: of one size and dtype; may be the same memory.
        choice: codec and form of feedback for the array.
        call: statistics of the operation.
        reduction: ``"sum"`` or ``"avg"``.
        name: name of the array; None for no error feedback.
        algorithm: algorithm that the caller asks for; None to choose.
        step: training step, whose codec messages without error feedback use; None leaves the codec as it is.
        framed: whether messages are encoded even by ``none``.
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
    return comm.start_scheduled(key, call, operands, algorithm=algorithm, feedback=feedback)


def remembering(
    comm: OperationStarter[Started], op: str, choice: Choice, name: str | None, n: int
) -> tuple[Callable[[Carrier], Any] | None, str | None]:
    """Return a function that sets a data path's memory and its step's codec, and the form; None without feedback."""
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
    reserved = [comm.reserve() for _ in range(codec.sums * len(arrays))]
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
        if device:  # the buffers are on the device, or in a host's copy of it
            assert send is not None
            assert recv is not None
            here = [first._replace(send=send, recv=recv)]
        # Inside the operation, so that the other ranks are told if it fails.
        parts = [part._replace(memory=memory(carrier, part)) for part in here]
        return linear_allreduce(
            carrier,
            parts,
            iter(reserved),
            comm.sum_array,
            coalesced=comm.coalesced_below,
            mean=mean,
            step=drawn,
            warm=comm.warm,
        )

    return comm.start_carried(run, codec, call, Operands(first.send, first.recv, device))


def _part(data: Flat, part: Extent) -> Part:
    elements = data.data[part.start : part.start + part.size]
    flat = Flat(elements, data.dtype, part.shape, True, False)
    return Part(flat, flat, part.name)


def at_step(step: int) -> Callable[[Carrier], None]:
    """Return a function that gives a carrier its codec of a training step, and no memory."""

    def choose(carrier: Carrier) -> None:
        carrier.codec = carrier.codec.at_step(step)

    return choose
