"""Send and receive.

Where a policy compresses sends on an axis, every float message there carries a header, so that the receiver
need not know what the sender chose; elsewhere the caller's bytes travel as they are.
"""

from __future__ import annotations

from mpi4py import MPI

from hybridcomp import wire
from hybridcomp.arrays import Flat, byte_view
from hybridcomp.codecs.registry import codec_for
from hybridcomp.collectives.carry import Carrier
from hybridcomp.collectives.engine import Pending, Steps
from hybridcomp.errors import MismatchError


def send_message(carrier: Carrier, comm: MPI.Comm, data: Flat, dest: int, tag: int) -> Steps:
    """Send ``data`` as one message."""
    t = carrier.transport
    buffer, length = carrier.encode(data.data)
    carrier.call.wire_bytes += length
    with t.keeping(buffer):
        yield Pending([comm.Isend([buffer[:length], MPI.BYTE], dest, tag)], [dest])
    t.give(buffer)


def receive_message(
    carrier: Carrier, comm: MPI.Comm, out: Flat, capacity: int, source: int, tag: int, status: MPI.Status
) -> Steps:
    """Receive one message of at most ``out.size`` elements.

    Args:
        carrier: transport and statistics; the codec is what the message says.
        comm: where the sender sent it.
        out: the caller's buffer.
        capacity: bytes of the largest message that the policy may make of ``out.size`` elements.
        source, tag: as in MPI, ANY_SOURCE and ANY_TAG included.
        status: filled with the message's source and tag.

    Raises:
        WireError: damaged.
        MismatchError: another dtype, or more elements than fit.
    """
    t = carrier.transport
    buffer = t.take(capacity)
    with t.keeping(buffer):
        yield Pending([comm.Irecv([buffer, MPI.BYTE], source, tag)], [source], [status])
        with carrier.call.decoding():
            raw, header = wire.open_message(buffer[: status.Get_count(MPI.BYTE)])
            if header.dtype is not out.dtype or header.count > out.size:
                raise MismatchError(
                    f"recv on axis {carrier.call.axis!r}: rank {t.rank} has room for {out.size} {out.dtype.label}, "
                    f"rank {status.Get_source()} sent {header.count} {header.dtype.label}"
                )
            codec_for(header).decode_flat(raw, header, out.data[: header.count], out.dtype)
    t.give(buffer)


def send_bytes(comm: MPI.Comm, data: Flat, dest: int, tag: int) -> Steps:
    """Send the caller's bytes as they are."""
    yield Pending([comm.Isend([byte_view(data.data), MPI.BYTE], dest, tag)], [dest])


def receive_bytes(comm: MPI.Comm, out: Flat, source: int, tag: int, status: MPI.Status) -> Steps:
    """Receive into the caller's buffer."""
    yield Pending([comm.Irecv([byte_view(out.data), MPI.BYTE], source, tag)], [source], [status])
