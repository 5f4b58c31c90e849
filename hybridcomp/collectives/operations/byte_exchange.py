"""Exchange bytes from every rank to every rank, for algorithms that run outside of this package.

Exchanges are matched by numbers that the caller gives, not by the order in which they start: ranks may start them in
different orders, each as soon as its own data are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.execution.progress import Pending, Ready, Request, Steps, engine
from hybridcomp.collectives.session import Session

_TAGS = 30_000  # below MPI's guaranteed 32767; so many exchanges may be in flight


class ByteExchange(Session):
    """A communicator of the same ranks as ``comm``, for exchanges of bytes alone.

    Making one is collective.

    Args:
        comm: an MPI intracommunicator.
        axis: for error messages.
        timeout: seconds that an exchange may take.
    """

    def __init__(self, comm: MPI.Comm, axis: str, timeout: float) -> None:
        super().__init__(comm, "none", axis, timeout)
        if self._notices is not None:
            self._notices.ordered = False

    def exchange(
        self,
        number: int,
        send: Sequence[ByteArray],
        recv: Sequence[ByteArray],
        received: list[int],
    ) -> Request:
        """Start to send bytes to every other rank, and to receive from each.

        Args:
            number: the same on all ranks, and of no other exchange; from 0.
            send: entry q goes to rank q; must stay unchanged until the exchange has ended.
            recv: room for what rank q sends, which may be less.
            received: entry q becomes the bytes that came from rank q. Entries of this rank are not touched.
        """
        t, tag = self._transport, number % _TAGS
        statuses = [MPI.Status() for _ in t.others]

        def steps() -> Steps:
            with t.keeping((send, recv)):
                incoming = [t.irecv(recv[q], q, tag) for q in t.others]
                outgoing = [t.isend(send[q], q, tag) for q in t.others]
                yield Pending(incoming, t.others, statuses)
                for q, status in zip(t.others, statuses, strict=True):
                    received[q] = status.Get_count(MPI.BYTE)
                yield Pending(outgoing, t.others, sends=True)

        return engine().start(
            steps(),
            f"exchange number {number} on axis {self.axis!r}, rank {self.rank} of {self.size}",
            self.timeout,
            priority=sum(part.size for part in send).bit_length(),
            notices=self._notices,
            number=number,
        )

    def after(self, events: Sequence[Ready]) -> Request:
        """Start an operation of this rank alone that ends when a device has come to ``events``."""

        def steps() -> Steps:
            yield Pending([], [], events=events)

        what = f"an exchange's data on axis {self.axis!r}, rank {self.rank} of {self.size}"
        return engine().start(steps(), what, self.timeout)

    @staticmethod
    def attend(until: Callable[[], bool]) -> None:
        """Make operations progress in this thread, beside others that compute, until a condition holds."""
        engine().attend(until, aside=True)
