"""Ranks of one machine that pass for those of several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI


class Hosts(MPI.Intracomm):
    """A communicator whose ranks are on the hosts that a test says.

    Attributes:
        of: number of each rank's host.
    """

    of: Sequence[int]

    def __new__(cls, comm: MPI.Intracomm | None = None, of: Sequence[int] = ()) -> Hosts:
        self: Hosts = super().__new__(cls, comm)
        self.of = list(of)
        return self

    def Split_type(self, split_type: int, key: int = 0, *_: Any) -> MPI.Intracomm:
        assert split_type == MPI.COMM_TYPE_SHARED
        return self.Split(self.of[self.rank], key)
