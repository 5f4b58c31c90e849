"""Provide mpi4py's persistent requests where the policy may compress the operation.

Their arguments are those of the non-blocking methods, and MPI's ``info``, which only MPI's own requests heed. A codec
is chosen at each start. A ``Recv_init`` must take what a compressed ``Send`` sends, and so cannot be MPI's own there.
Sends and receives that no policy compresses are MPI's own requests; collectives are requests of this package that start
those of MPI's, so that waiting ends in time, and that all ranks are told where one's arguments are wrong. Statistics
count these starts, not their bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self

from mpi4py import MPI

from hybridcomp.collectives.fast_path_cache import library
from hybridcomp.collectives.operations.reductions import mpi_operator
from hybridcomp.collectives.operations.uncompressed import Operates, told
from hybridcomp.collectives.requests import Request, copy_handle

_OURS = ("name", "phase", "codec", "algorithm")  # keyword arguments that mpi4py does not have


class Prequest(MPI.Prequest):
    """Persistent request of mpi4py's whose starts are non-blocking operations of a communicator of this package.

    Where each start starts a request of MPI's own, it is that request to MPI. Else it has, while it is started, the MPI
    request of the operation, so that ``MPI.Request.Waitall`` and its kin take it, and is the null request otherwise.
    ``Startall`` of this class starts requests of all kinds. ``MPI.Prequest.Startall``, which knows handles alone, takes
    none of this class.
    """

    _begin: Callable[[], Request] | None = None
    _running: Request | None = None
    _own: MPI.Prequest | None = None

    @classmethod
    def of(cls, begin: Callable[[], Request], own: MPI.Prequest | None = None) -> Self:
        """Make a request whose starts call ``begin``, which may start a persistent request of MPI's own."""
        self = cls.__new__(cls)
        self._begin, self._own = begin, own
        self._rest()
        return self

    def Start(self) -> None:
        """Start the operation.

        Raises:
            MPI.Exception: it has been started and not been waited for, or the request has been freed.
        """
        # MPI's ``Waitall`` and its kin leave the null request, and of MPI's own one that MPI may start again.
        if self._begin is None or (self._own is None and self.handle != MPI.REQUEST_NULL.handle):
            raise MPI.Exception(MPI.ERR_REQUEST)
        self._running = self._begin()
        self._stand_for_running()

    @classmethod
    def Startall(cls, requests: Iterable[MPI.Prequest]) -> None:
        """Start requests, of this class or MPI's own, in their order."""
        for request in requests:
            request.Start()

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait for the operation within the communicator's timeout; return at once if it has not been started."""
        running = self._under_way()
        if running is None:
            return super().Wait(status)
        try:
            running.Wait(status)
        finally:
            self._rest()
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Make progress once; tell whether the operation has ended. Raises its error."""
        running = self._under_way()
        if running is None:
            return super().Test(status)
        ended = True
        try:
            ended = running.Test(status)
        finally:
            if ended:
                self._rest()
            else:
                self._stand_for_running()
        return ended

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Wait as :meth:`Wait` does."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """Test as :meth:`Test` does; the second item is None."""
        return self.Test(status), None

    def Cancel(self) -> None:
        """Cancel a receive that no message has reached, as ``Request.cancel`` does; it is then waited for."""
        running = self._under_way()
        if running is not None:
            running.cancel()
            self._stand_for_running()

    def Free(self) -> None:
        """Free the request; an operation under way goes on, unless it is MPI's own."""
        running = self._under_way()
        own, self._begin, self._own = self._own, None, None
        if running is not None and own is None:
            running.generalize()
        self._rest()
        if own is not None:
            own.Free()

    cancel, free = Cancel, Free

    def _rest(self) -> None:
        self._running = None
        copy_handle(MPI.REQUEST_NULL if self._own is None else self._own, self)

    def _stand_for_running(self) -> None:
        """Have the handle of the operation under way, unless that is this request's own."""
        running = self._running
        if running is not None and (self._own is None or not running.passed):
            copy_handle(running, self)

    def _under_way(self) -> Request | None:
        """Return the operation under way, with the handle that it has by now; None if there is none.

        A wait of MPI's, which knows handles alone, has ended the operation for the one that it has set to null.
        """
        running = self._running
        if running is not None and running.passed and self._own is None:
            if self.handle == MPI.REQUEST_NULL.handle:
                self._running = running = None
            else:
                copy_handle(self, running)
        return running


def message(method: str) -> Callable[..., MPI.Prequest]:
    """Return the method that makes persistent requests of a non-blocking send or receive, named by the blocking one."""
    name, begins = f"{method}_init", f"I{method[0].lower()}{method[1:]}"

    def init(comm: Operates, *arguments: Any, **named: Any) -> MPI.Prequest:
        session = comm.session
        mpis = {key: value for key, value in named.items() if key not in _OURS}
        own = functools.partial(getattr(session.p2p, name), *arguments, **mpis)
        exact = session.size == 1 or session.policy.least_bytes(session.axis, "send") is None
        if exact and named.get("codec") is None:
            made: MPI.Prequest = own()
            return made
        buf = arguments[0] if arguments else mpis.get("buf")
        if library().survey(buf, None) >= -1:
            own().Free()  # raises MPI's errors for wrong arguments
        return Prequest.of(functools.partial(getattr(comm, begins), *arguments, **named))

    return _described(init, name, begins)


def persistent(
    method: str,
    op: str,
    kind: type[MPI.Comm] = MPI.Intracomm,
    *,
    exact: bool = False,
    operator_at: int | None = None,
    wrong: Callable[[Any], bool] = lambda _: False,
) -> Callable[..., MPI.Prequest]:
    """Return the method that makes persistent requests of a non-blocking collective.

    Args:
        method: name of the blocking method.
        op: the policy's word for the operation.
        kind: class of mpi4py that has MPI's own method.
        exact: whether no policy compresses the operation.
        operator_at: number of the argument that is the reduction operator; None for operations that have none.
        wrong: function that tells whether MPI's own request of a communicator gives wrong results.
    """
    name, begins = f"{method}_init", f"I{method[0].lower()}{method[1:]}"

    def is_mpis(comm: Operates, operator: Any, codec: Any) -> bool:
        if operator_at is not None and not isinstance(operator, MPI.Op):  # an average, which MPI has not
            return False
        session = comm.session
        never = exact or session.size == 1 or session.policy.least_bytes(session.axis, op) is None
        return never and codec is None and not wrong(comm)

    @told
    def init(comm: Operates, *arguments: Any, info: MPI.Info = MPI.INFO_NULL, **named: Any) -> MPI.Prequest:
        if arguments and isinstance(arguments[-1], MPI.Info):
            *most, info = arguments
            arguments = tuple(most)
        at = len(arguments) if operator_at is None else operator_at
        operator = arguments[at] if at < len(arguments) else named.get("op", MPI.SUM)
        if not is_mpis(comm, operator, named.get("codec")):
            comm.pass_through.initialised(name, None)
            return Prequest.of(functools.partial(getattr(comm, begins), *arguments, **named))
        given = {key: value for key, value in named.items() if key not in _OURS} | {"info": info}
        if operator_at is not None:
            buffers = (*arguments[:2], named.get("sendbuf"), named.get("recvbuf"))
            given["op"] = mpi_operator(operator, *buffers, sums=op == "all_reduce")
            given |= zip(("root",), arguments[at + 1 :], strict=False)
        mpi = comm.session.mpi if kind is MPI.Intracomm else kind(comm.session.mpi)
        own = comm.pass_through.initialised(
            name, functools.partial(getattr(mpi, name), *arguments[:at], **given)
        )
        assert own is not None
        return Prequest.of(functools.partial(comm.pass_through.begin, op, _started, (own,)), own)

    return _described(init, name, begins)


def _started(request: MPI.Prequest) -> MPI.Request:
    request.Start()
    return request


def _described(init: Any, name: str, begins: str) -> Callable[..., MPI.Prequest]:
    init.__name__, init.__qualname__ = name, f"Communicator.{name}"
    init.__doc__ = f"Make a persistent request of :meth:`{begins}`, with its arguments."
    made: Callable[..., MPI.Prequest] = init
    return made
