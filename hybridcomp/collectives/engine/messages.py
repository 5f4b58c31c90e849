"""Run sends and receives of single messages in the compiled engine, framed as in :mod:`.framing`.

MPI matches such messages with the caller's own, in the order in which they are posted: each is posted before its start
returns, and overtakes no operation that waits to be posted (:mod:`~.execution.post_queue`), since the caller comes here
only where none waits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec
from hybridcomp.collectives.data_path import framing as p2p
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.data_path.coding import NONE
from hybridcomp.collectives.engine.faults import Fault
from hybridcomp.collectives.engine.programs import awaited, compiled, ended, started
from hybridcomp.collectives.execution.steps import Steps
from hybridcomp.collectives.transport.mailbox import Incoming
from hybridcomp.schedules import registry
from hybridcomp.schedules.schedule import Operation
from hybridcomp.schedules.topology import Topology

_PAIR = Topology((0, 1))  # the sender and the receiver
_MOST_PROGRAMS = 1024
_MOST_BYTES = (1 << 31) - 1  # the largest count of MPI


class MessagePrograms:
    """Compiled sends and receives of one communicator, by codec, dtype and count; each start gives peer and tag.

    Args:
        group: group that :func:`~hybridcomp.collectives.engine.groups.join_for_messages` made.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._programs: dict[tuple[Any, ...], Any] = {}

    def send(self, codec: Codec, dtype: DType, count: int) -> Any:
        """Return the program that encodes and sends; None where the engine does not run it."""
        return self._find(0, codec, (codec,), dtype, count)

    def recv(self, codecs: Iterable[Codec], dtype: DType, count: int) -> Any:
        """Return the program that receives at most ``count`` elements; None where the engine does not run it.

        Args:
            codecs: codecs that the sender may use.
            dtype: dtype of the elements.
            count: number of elements for which there is room.
        """
        return self._find(1, NONE, tuple(codecs), dtype, count)

    def _find(self, rank: int, codec: Codec, codecs: tuple[Codec, ...], dtype: DType, count: int) -> Any:
        key = (rank, codec, codecs, dtype, count)
        if key not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = self._compile(*key)
        return self._programs[key]

    def _compile(self, rank: int, codec: Codec, codecs: tuple[Codec, ...], dtype: DType, count: int) -> Any:
        if not (dtype.is_float and count) or any(c.encoder is None for c in codecs):
            return None
        room = p2p.room(codecs, count, dtype)
        if room > _MOST_BYTES:
            return None
        operation = Operation("send", (count,), dtype.itemsize, chunk_bytes=room)
        schedule = registry.build(operation, _PAIR, rank, "direct")
        sizes = (0, count) if rank else (count, 0)
        return compiled(self._group, schedule, codec, dtype, sizes, framed=room)


def sending(program: Any, data: Flat, dest: int, tag: int, carrier: Carrier) -> Steps:
    """Send an array in host memory; it is encoded and posted in the first step.

    Args:
        program: result of :meth:`MessagePrograms.send`.
        data: array to send.
        dest, tag: as in MPI; ``dest`` has had a message from here before.
        carrier: transport and statistics.
    """
    # The data are encoded at once, however long that takes: the caller's next message must not overtake this one.
    run = started(program, data, None, math.inf, envelope=(dest, tag))
    with carrier.transport.keeping((run, data)):
        yield from awaited(run, carrier)


def receiving(program: Any, out: Flat, source: int, tag: int, status: MPI.Status, carrier: Carrier) -> Steps:
    """Receive into an array in host memory, posted in the first step.

    Args:
        program: result of :meth:`MessagePrograms.recv`.
        out: array to receive into.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: status to fill as :func:`~hybridcomp.collectives.data_path.framing.receive_message` does.
        carrier: transport and statistics.

    Raises:
        WireError, MismatchError: as in that function.
    """
    run = started(program, None, out, math.inf, envelope=(source, tag))
    yield from received(run, out, status, carrier)


def received(run: Any, out: Flat, status: MPI.Status, carrier: Carrier) -> Steps:
    """Wait for a started receive, and end it as :func:`receiving` does."""
    with carrier.transport.keeping((run, out)):
        yield from ended(run)
        raw = run.status()
        ctypes.memmove(MPI._addressof(status), raw, len(raw))
        failure = run.failure()
        if failure is not None and failure[0] == Fault.MESSAGE:
            # The message is damaged, too long, or by a codec that compiled code does not know.
            whole = np.frombuffer(failure[-1], np.uint8)
            message = Incoming(status.Get_source(), whole, MPI.REQUEST_NULL)
            p2p.take_message(carrier, message, whole.size, out, status)
            return
        yield from awaited(run, carrier)
