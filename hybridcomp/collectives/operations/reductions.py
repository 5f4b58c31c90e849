"""Provide mpi4py's reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.collectives.algorithms.schedules import OperationKey
from hybridcomp.collectives.buffers import (
    ForeignBufferError,
    datatype_of,
    is_in_place,
    like,
    parse,
    part,
    same_dtype,
    typed,
)
from hybridcomp.collectives.choices import CodecLike
from hybridcomp.collectives.execution import progress as engine
from hybridcomp.collectives.execution.mpi_collectives import AVG, reduces_directly, reduction_of
from hybridcomp.collectives.execution.mpi_ops import fold_of, same_on_all
from hybridcomp.collectives.operations import flat_gather_scatter, flat_reductions
from hybridcomp.collectives.operations.fast_path import FastPath
from hybridcomp.collectives.operations.fast_path_cache import ForOnceError, Key, Kind
from hybridcomp.collectives.requests import Request
from hybridcomp.collectives.session import Op

Buffer = Any


class Reductions(FastPath):
    """Methods Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block, Scan and Exscan of a communicator.

    ``op`` is an MPI operation, or ``"avg"``. Floats are compressed for ``MPI.SUM`` and ``"avg"`` alone.

    Of floats, ``MPI.MAX`` and ``MPI.MIN`` are IEEE 754-2019's maximum and minimum: NaN where any rank has one, and of
    0.0 and -0.0 the maximum is 0.0, the minimum -0.0. ``MPI.MAXLOC`` and ``MPI.MINLOC`` find a NaN first, and of equal
    values the lower index. A NaN in a result has the same bits on all ranks.
    """

    # -- all-reduce ----------------------------------------------------------------------------------

    def Allreduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> None:
        """Reduce over all ranks; every rank gets the same bits.

        Args:
            sendbuf: values of this rank, or ``MPI.IN_PLACE``.
            recvbuf: buffer of the result, of the same count and dtype.
            op: reduction operator: see the class.
            name, phase, codec, algorithm: see :mod:`~hybridcomp.collectives.communicator`.
        """
        if self.allreduce_immediate(
            sendbuf, recvbuf, op, name=name, phase=phase, codec=codec, algorithm=algorithm
        ):
            return
        return self.start_allreduce(sendbuf, recvbuf, op, name, phase, codec, algorithm).wait()

    def allreduce_immediate(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> bool:
        """Run :meth:`Allreduce` if that is one native call on plain arrays; else do nothing and return False."""
        key = ("all_reduce", id(op), name, phase, codec, algorithm)
        return self._done(key, self._sums, sendbuf, recvbuf, op)

    def Iallreduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Allreduce`."""
        return Request(self.start_allreduce(sendbuf, recvbuf, op, name, phase, codec, algorithm))

    def start_allreduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> engine.Request:
        """Start :meth:`Iallreduce` as an operation without an MPI request."""
        key = ("all_reduce", id(op), name, phase, codec, algorithm)
        request = self._begun(key, self._sums, (sendbuf, recvbuf), op)
        if request is not None:
            return request
        try:
            recv = parse(recvbuf, writable=True)
            send = recv if is_in_place(sendbuf) else like(parse(sendbuf), recv)
        except ForeignBufferError:
            return self._foreign(
                "all_reduce",
                lambda: self.mpi.Iallreduce(sendbuf, recvbuf, _mpi(op, recvbuf, sums=True)),
                codec,
            )
        return flat_reductions.allreduce(self, send, recv, op, name, phase, codec, algorithm)

    # -- reduce-scatter ------------------------------------------------------------------------------

    def Reduce_scatter_block(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> None:
        """Reduce ``sendbuf`` (size * n elements) over all ranks; rank r gets block r in ``recvbuf`` (n).

        With ``MPI.IN_PLACE`` the values are in ``recvbuf``, and the block comes to its beginning.
        """
        key = ("reduce_scatter", id(op), name, phase, codec, algorithm)
        if self._done(key, self._sums, sendbuf, recvbuf, op):
            return
        return self.start_reduce_scatter_block(sendbuf, recvbuf, op, name, phase, codec, algorithm).wait()

    def Ireduce_scatter_block(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Reduce_scatter_block`."""
        return Request(self.start_reduce_scatter_block(sendbuf, recvbuf, op, name, phase, codec, algorithm))

    def start_reduce_scatter_block(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> engine.Request:
        """Start :meth:`Ireduce_scatter_block` as an operation without an MPI request."""
        key = ("reduce_scatter", id(op), name, phase, codec, algorithm)
        request = self._begun(key, self._sums, (sendbuf, recvbuf), op)
        if request is not None:
            return request
        try:
            if is_in_place(sendbuf):
                send = parse(recvbuf, writable=True, blocks=self.size)
                recv = part(send, 0, send.size // self.size)
            else:
                recv = parse(recvbuf, writable=True)
                send = same_dtype(parse(sendbuf, blocks=self.size), recv)
        except ForeignBufferError:
            return self._foreign(
                "reduce_scatter",
                lambda: self.mpi.Ireduce_scatter_block(sendbuf, recvbuf, _mpi(op, recvbuf)),
                codec,
            )
        return flat_reductions.reduce_scatter_block(self, send, recv, op, name, phase, codec, algorithm)

    def Reduce_scatter(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        recvcounts: Sequence[int] | None = None,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> None:
        """Reduce ``sendbuf`` over all ranks; rank r gets part r, of ``recvcounts[r]`` elements.

        Without ``recvcounts`` the ranks tell each other the sizes of their receive buffers first.
        """
        self.start_reduce_scatter(sendbuf, recvbuf, recvcounts, op, name, phase, codec).wait()

    def Ireduce_scatter(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        recvcounts: Sequence[int] | None = None,
        op: Op = MPI.SUM,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> Request:
        """Start :meth:`Reduce_scatter`; waits for the counts if they are not given, as mpi4py does."""
        return Request(self.start_reduce_scatter(sendbuf, recvbuf, recvcounts, op, name, phase, codec))

    def start_reduce_scatter(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        recvcounts: Sequence[int] | None,
        op: Op,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
    ) -> engine.Request:
        """Start :meth:`Ireduce_scatter` as an operation without an MPI request."""
        in_place = is_in_place(sendbuf)
        try:
            if in_place and recvcounts is None:
                raise ForeignBufferError("in place, the counts must be given")
            recv = parse(recvbuf, writable=True)
            send = recv if in_place else same_dtype(parse(sendbuf), recv)
        except ForeignBufferError:
            return self._foreign(
                "reduce_scatter",
                lambda: self.mpi.Ireduce_scatter(sendbuf, recvbuf, recvcounts, _mpi(op, recvbuf)),
                codec,
            )
        counts = self._counts(recv) if recvcounts is None else [int(n) for n in recvcounts]
        if in_place and len(counts) == self.size and sum(counts) == send.size:
            recv = part(recv, 0, counts[self.rank])
        return flat_reductions.reduce_scatter(self, send, recv, counts, op, name, phase, codec)

    def _counts(self, recv: Flat) -> list[int]:
        """Gather the number of elements of every rank's receive buffer."""
        counts = np.empty(self.size, np.int64)
        mine, every = parse(np.array([recv.size])), parse(counts, writable=True)
        flat_gather_scatter.allgather(self, mine, every, None, None, "none").wait()
        return counts.tolist()

    # -- to one rank ---------------------------------------------------------------------------------

    def Reduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> None:
        """Reduce to rank ``root``; exact unless the policy names it. ``recvbuf`` is used at the root alone."""
        self.start_reduce(sendbuf, recvbuf, op, root, name, phase, codec, algorithm).wait()

    def Ireduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op = MPI.SUM,
        root: int = 0,
        *,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Reduce`."""
        return Request(self.start_reduce(sendbuf, recvbuf, op, root, name, phase, codec, algorithm))

    def start_reduce(
        self,
        sendbuf: Buffer,
        recvbuf: Buffer,
        op: Op,
        root: int,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> engine.Request:
        """Start :meth:`Ireduce` as an operation without an MPI request."""
        try:
            recv = parse(recvbuf, writable=True) if root == self.rank else None
            in_place = recv is not None and is_in_place(sendbuf)
            send = recv if recv is not None and in_place else parse(sendbuf)
            if recv is not None:
                like(send, recv)
        except ForeignBufferError:
            return self._foreign(
                "reduce", lambda: self.mpi.Ireduce(sendbuf, recvbuf, _mpi(op, sendbuf, recvbuf), root), codec
            )
        return flat_reductions.reduce(self, send, recv, op, root, name, phase, codec, algorithm)

    # -- prefixes ------------------------------------------------------------------------------------

    def Scan(self, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> None:
        """Reduce over this rank and the ranks before it, by MPI's own operation."""
        self._foreign("scan", lambda: self.mpi.Iscan(sendbuf, recvbuf, _mpi(op, recvbuf))).wait()

    def Iscan(self, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> Request:
        """Start :meth:`Scan`."""
        return Request(self._foreign("scan", lambda: self.mpi.Iscan(sendbuf, recvbuf, _mpi(op, recvbuf))))

    def Exscan(self, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> None:
        """Reduce over the ranks before this one, by MPI's own operation."""
        self._foreign("exscan", lambda: self.mpi.Iexscan(sendbuf, recvbuf, _mpi(op, recvbuf))).wait()

    def Iexscan(self, sendbuf: Buffer, recvbuf: Buffer, op: MPI.Op = MPI.SUM) -> Request:
        """Start :meth:`Exscan`."""
        return Request(self._foreign("exscan", lambda: self.mpi.Iexscan(sendbuf, recvbuf, _mpi(op, recvbuf))))

    # -- on the fast path ----------------------------------------------------------------------------

    def _sums(self, key: Key, send: Any, recv: Any, op: Any) -> Kind | None:
        """Return the kind of a reduction on plain arrays; None if neither MPI nor the engine does it alone."""
        what, _, name, phase, codec, algorithm = key
        whole, p = what == "all_reduce", self.size
        data = recv if whole else send  # the array that the policy is asked about
        if not data.size or not (isinstance(op, MPI.Op) or op == AVG):
            return None
        if send is not MPI.IN_PLACE and send.size != recv.size * (1 if whole else p):
            return None
        try:
            flat = parse(data)
        except ForeignBufferError:
            return None
        choice = flat_reductions.choose_sum(self, what, flat, op, name, phase, codec, ahead=True)
        if choice.once:
            raise ForOnceError
        call = self._call(what, choice, flat.nbytes, (1 + whole) * (p - 1) * flat.nbytes // p)
        direct = flat_reductions.uses_schedule(choice, flat, op)
        if self._programs is not None and (whole or direct) and (choice.feedback is None or name is None):
            counts = (flat.size,) if whole else (recv.size,) * p
            fold = fold_of(op, flat.dtype) if whole else ""
            operation = OperationKey.of(what, choice, flat.dtype, counts, reduction_of(op), fold=fold)
            program = self._programs.find(operation, algorithm, alone=True)
            if program is not None:
                return call, program
        if not isinstance(op, MPI.Op) or direct or choice.codec.linear or not reduces_directly(flat.dtype, 1):
            return None
        datatype = typed(data, flat.dtype)[1]
        own = same_on_all(op, datatype, sums=whole and not self.cuda_aware.collectives)
        return call, [0, 0, recv.size, datatype.handle, own.handle, self.mpi.handle]


def _mpi(op: Op, *specs: Any, sums: bool = False) -> MPI.Op:
    """Return the operator by which MPI reduces buffers; for ``sums`` see :func:`.same_on_all`.

    Raises:
        ForeignBufferError: MPI has no average.
    """
    if not isinstance(op, MPI.Op):
        raise ForeignBufferError(f"op {op!r} needs an array of numbers")
    return same_on_all(op, datatype_of(*specs), sums=sums)
