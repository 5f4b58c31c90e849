"""Pack the elements of derived datatypes into arrays that codecs take, and unpack results into the caller's memory.

MPI's type signature says what an operation moves; how the elements lie in memory is each rank's own affair. So a buffer
of a derived datatype, of one basic type throughout, takes part in an operation as an array of that type. MPI copies:
this rank sends itself a message, from the one datatype to the other.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.collectives.datatypes import BY_HANDLE, DATATYPES, ForeignBufferError

_lock = threading.Lock()  # messages of one tag
_own: list[MPI.Intracomm] = []


class Layout:
    """Memory of a caller's elements of a derived datatype.

    Args:
        data: object that has the memory, ``MPI.BOTTOM``, or None.
        datatype: MPI's derived datatype.
        writable: whether the buffer receives data.

    Attributes:
        dtype: type of all its basic elements.
        each: number of basic elements of one of the datatype.

    Raises:
        ForeignBufferError: the datatype is made of several basic ones, or of one that no message carries.
    """

    def __init__(self, data: Any, datatype: MPI.Datatype, *, writable: bool) -> None:
        basic = basics(datatype)
        dtype = BY_HANDLE.get(next(iter(basic))) if len(basic) == 1 else None
        if dtype is None or dtype not in DATATYPES:
            raise ForeignBufferError("the datatype is not made of one basic one that a message can carry")
        self.dtype, self.each = dtype, datatype.Get_size() // dtype.itemsize
        self._data, self._datatype, self._writable = data, datatype, writable

    def __len__(self) -> int:
        """Return the number of elements of the datatype that lie in the memory; 0 where that has no end."""
        if self._data is None or self._data is MPI.BOTTOM:
            return 0
        _, extent = self._datatype.Get_extent()
        sized = isinstance(self._data, np.ndarray | memoryview)  # in Fortran's order, too
        held = self._data if sized else MPI.buffer.frombuffer(self._data, readonly=not self._writable)
        nbytes = int(held.nbytes)
        return nbytes // extent if extent > 0 else 0

    def load(self, values: Any, count: int, displ: int) -> None:
        """Copy ``count`` elements of the datatype, from the one numbered ``displ``, to an array."""
        if count:
            self._copy(self._spec(count, displ), [values, values.size, DATATYPES[self.dtype]])

    def store(self, values: Any, count: int, displ: int) -> None:
        """Copy an array to ``count`` elements of the datatype, or to the first of them that it is enough for."""
        if count and values.size:
            self._copy([values, values.size, DATATYPES[self.dtype]], self._spec(count, displ))

    def _spec(self, count: int, displ: int) -> list[Any]:
        return [self._data, (count, displ), self._datatype] if displ else [self._data, count, self._datatype]

    @staticmethod
    def _copy(source: list[Any], target: list[Any]) -> None:
        with _lock:
            _to_itself().Sendrecv(source, 0, 0, target, 0, 0)


def _to_itself() -> MPI.Intracomm:
    """Return the communicator of this rank's messages to itself."""
    if not _own:
        _own.append(MPI.COMM_SELF.Dup())
    return _own[0]


def unpack(message: ByteArray, buf: Any) -> MPI.Request:
    """Copy the bytes of a message to a buffer that only MPI understands; return a request that has ended.

    Raises:
        MPI.Exception: the buffer is too small.
    """
    status = MPI.Status()
    with _lock:
        comm = _to_itself()
        received = comm.Irecv(buf, 0, 0)
        comm.Send([message, MPI.BYTE], 0, 0)
        received.Wait(status)
    if status.Get_count(MPI.BYTE) < message.size:  # of which Open MPI says nothing
        raise MPI.Exception(MPI.ERR_TRUNCATE)
    return received


def pack(
    data: Any, count: Any, displ: Any, datatype: MPI.Datatype, *, writable: bool, blocks: int = 1
) -> Flat:
    """Return the elements of a buffer of a derived datatype as an array of its basic type.

    Args:
        data: object that has the memory.
        count: number of elements of the datatype, in each block; None for as many as there are.
        displ: number of the first one; None for 0.
        datatype: MPI's derived datatype.
        writable: whether the buffer receives data: then the array's ``store`` writes them back.
        blocks: number of blocks.

    Raises:
        ForeignBufferError: as :class:`Layout`.
        BufferError, TypeError, ValueError: mpi4py's, for what it does not take.
    """
    layout = Layout(data, datatype, writable=writable)
    given = [data, (count, displ), datatype]
    (MPI.COMM_SELF.Recv_init if writable else MPI.COMM_SELF.Send_init)(
        given, 0
    ).Free()  # raises mpi4py's errors
    start = 0 if displ is None else operator.index(displ)
    n = len(layout) - start if count is None else operator.index(count) * blocks
    values = np.empty(n * layout.each, layout.dtype.storage)
    layout.load(values, n, start)
    store: Callable[[Any], None] | None = None
    if writable:
        store = lambda result: layout.store(result, n, start)  # noqa: E731
    return Flat(values, layout.dtype, (values.size,), False, False, store)


def basics(datatype: MPI.Datatype) -> dict[int, MPI.Datatype]:
    """Return the basic datatypes that a datatype is made of, by handle."""
    if datatype.is_predefined:
        return {datatype.handle: datatype}
    *_, parts = datatype.Get_contents()
    found: dict[int, MPI.Datatype] = {}
    for one in parts:
        found |= basics(one)
        if not one.is_predefined:
            one.Free()
    return found
