"""Start all-reduces of several arrays as one operation, and those by linear codecs of one or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridcomp.arrays import Flat
from hybridcomp.codecs import LinearCodec
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.engine.linear import Part, linear_allreduce
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.collectives.execution.progress import Request, Steps
from hybridcomp.collectives.session import Op
from hybridcomp.collectives.starting import Operands, OperationStarter
from hybridcomp.collectives.stats import Call
from hybridcomp.device import DeviceArray
from hybridcomp.policy import Choice, check_feedback
from hybridcomp.schedules.in_order import TAGS


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
    comm: OperationStarter, data: Flat, parts: Sequence[Extent], op: Op, choice: Choice, step: int
) -> Request | None:
    """Start one all-reduce of parts of an array in host memory, in place, each with the bits that it has alone.

    Args:
        data: the array.
        parts: of it.
        op: a sum or an average.
        choice: what carries them.
        step: of training, for codecs that draw random numbers.

    Returns:
        None where the engine does not do it: then nothing has been started.
    """
    codec, form, programs = choice.codec, choice.feedback, comm._programs
    # A codec that is another one at each step of a memory may be another one for each part.
    drawn = form is not None and codec.at_step(0) is not codec and not codec.linear
    if programs is None or drawn:
        return None
    counts = tuple(part.size for part in parts)
    nbytes = sum(counts) * data.dtype.itemsize
    names = ", ".join(part.name for part in parts)
    about = {"counts": counts, "dtype": data.dtype, "reduction": op, "name": names}
    plain = 2 * (comm.size - 1) * nbytes // comm.size
    if codec.linear:
        call = comm._call("all_reduce", choice, nbytes, plain, **about)
        arrays = [_part(data, part) for part in parts]
        return allreduce_linear(comm, choice, call, arrays, op == AVG, step, [])
    key = OperationKey.of("all_reduce", choice, data.dtype, counts, op, feedback=form)
    program = programs.find_joined(key, tuple((part.start, part.size) for part in parts))
    if program is None:
        return None
    feedback: Callable[[Carrier], Any] = at_step(step)
    if form is not None:
        check_feedback("all_reduce", codec, form)
        keys = [(comm.axis, part.name) for part in parts]
        feedback = lambda carrier: comm.feedback.begin_joined(keys, counts, data.dtype, form)  # noqa: E731
    call = comm._call("all_reduce", choice, nbytes, plain, **about)
    return comm._execute(program, codec, call, Operands(data, data), feedback=feedback)


def allreduce_linear(
    comm: OperationStarter,
    choice: Choice,
    call: Call,
    arrays: Sequence[Part],
    mean: bool,
    step: int | None,
    device: list[DeviceArray],
) -> Request:
    """Start an all-reduce by a linear codec of one array, or of several in host memory."""
    codec, programs, tag = choice.codec, comm._programs, comm._transport.tag
    assert isinstance(codec, LinearCodec)
    numbers = [
        ([tag() for _ in range(TAGS)], 0) if programs is None else ([], programs.reserve())
        for _ in range(codec.rounds * len(arrays))
    ]
    drawn = comm.step if step is None else step
    first = arrays[0]
    on_host = choice.feedback is not None and first.name is not None
    if choice.feedback is not None and on_host:
        check_feedback("all_reduce", codec, choice.feedback)

    def run(carrier: Carrier, send: Flat | None, recv: Flat | None, _: Any) -> Steps:
        here = arrays
        if device:  # these are there, or in a host's copy of it
            assert send is not None
            assert recv is not None
            here = [arrays[0]._replace(send=send, recv=recv)]
        # In the operation: the other ranks are told if it fails.
        parts = [_with_residual(comm, choice, part) for part in here]
        ways = comm._schedules, programs
        return linear_allreduce(carrier, parts, numbers, *ways, mean=mean, step=drawn, warm=comm.warm)

    return comm._carried(run, codec, call, Operands(first.send, first.recv, device), on_host=on_host)


def _with_residual(comm: OperationStarter, choice: Choice, part: Part) -> Part:
    """Give a named part its memory, if it is carried with one."""
    if choice.feedback is None or part.name is None:
        return part
    kind, key = part.recv.dtype.accumulator, (comm.axis, part.name)
    return part._replace(residual=comm.feedback.residual(key, part.recv.size, kind))


def _part(data: Flat, part: Extent) -> Part:
    elements = data.data[part.start : part.start + part.size]
    flat = Flat(elements, data.dtype, part.shape, True, False)
    return Part(flat, flat, part.name)


def at_step(step: int) -> Callable[[Carrier], None]:
    """Return what gives a carrier its codec of a step of training, and no memory."""

    def choose(carrier: Carrier) -> None:
        carrier.codec = carrier.codec.at_step(step)

    return choose
