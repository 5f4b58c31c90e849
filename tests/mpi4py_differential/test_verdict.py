"""Communicators with faults, on one rank: what the comparison says of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.mpi4py_differential.calls import Draw, collective
from tests.mpi4py_differential.draws import simplest
from tests.mpi4py_differential.messages import exchange
from tests.mpi4py_differential.spelling import CHOICES
from tests.mpi4py_differential.verdict import compare


def spelled(**choices: int) -> list[dict[str, int]]:
    """Return one rank's spelling, plain but for some choices."""
    return [dict.fromkeys(CHOICES, 0) | choices]


def array_of(message: Any) -> Any:
    """Return the array of a message."""
    return message[0] if isinstance(message, list | tuple) else message


class Faulty:
    """``MPI.COMM_SELF`` with a fault in one method."""

    def __init__(self, fault: Any) -> None:
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self._fault(getattr(MPI.COMM_SELF, name), *args, **named)


def in_c_order(method: Any, send: Any, recv: Any, *rest: Any) -> None:
    """Send the elements in C order, whatever the memory has."""
    method(np.ascontiguousarray(array_of(send)), recv, *rest)


def over_the_gap(method: Any, send: Any, recv: Any, *rest: Any) -> None:
    """Write all of the receive array."""
    array_of(recv)[...] = 0
    method(send, recv, *rest)


def beyond(method: Any, send: Any, recv: Any, *rest: Any) -> None:
    """Write beyond the receive array."""
    method(send, recv, *rest)
    array = array_of(recv)
    np.ndarray(
        1, array.dtype, buffer=array.base, offset=array.ctypes.data - array.base.ctypes.data + array.nbytes
    )[0] = 1


def off(method: Any, send: Any, recv: Any, *rest: Any) -> None:
    """Be off by two thousandths."""
    method(send, recv, *rest)
    array_of(recv)[...] += array_of(recv).dtype.type(0.002)


def into_the_send_buffer(method: Any, send: Any, recv: Any, *rest: Any) -> None:
    """Write the send buffer."""
    method(send, recv, *rest)
    array_of(send)[...] = 0


def refusing(method: Any, *_: Any) -> None:
    """Refuse what is right."""
    raise TypeError(method.__name__)


def nothing(*_: Any) -> None:
    """Take anything, and do nothing."""


def miscounting(method: Any, *args: Any, status: MPI.Status, **named: Any) -> None:
    """Say that one element less has come."""
    method(*args, status=status, **named)
    status.Set_elements(MPI.FLOAT, status.Get_count(MPI.FLOAT) - 1)


GAPS = spelled(gap=1, displs=3)  # a vector message, whose blocks have a gap before and after


@pytest.mark.parametrize(
    ("fault", "changes", "policy", "kind"),
    [
        (in_c_order, {"call": "Alltoall", "n": 6, "send": spelled(order=2)}, "none", "values"),
        (over_the_gap, {"call": "Allgatherv", "recv": GAPS}, "none", "gap written"),
        (over_the_gap, {"call": "Allgatherv", "n": 5000, "recv": GAPS}, "int8", "gap written"),
        (beyond, {"call": "Allgather"}, "exact", "gap written"),
        (off, {"call": "Allreduce", "n": 5000}, "exact", "values"),
        (off, {"call": "Allreduce", "n": 5000}, "bounded:abs=0.001", "bound"),
        (off, {"call": "Allreduce", "n": 5000}, "int8", ""),
        (off, {"call": "Allreduce", "n": 500}, "int8", "values"),  # small messages are exact
        (off, {"call": "Gather", "n": 5000}, "hybrid", "values"),  # which compresses no gathers
        (into_the_send_buffer, {"call": "Alltoall"}, "none", "send buffer written"),
        (refusing, {"call": "Alltoall"}, "none", "raises TypeError"),
        (
            nothing,
            {"call": "Alltoall", "refused": "unknown code", "refused_side": "recv"},
            "none",
            "raises no KeyError",
        ),
        (
            refusing,
            {"call": "Alltoall", "refused": "unknown code", "refused_side": "recv"},
            "none",
            "raises TypeError for KeyError",
        ),
        (
            miscounting,
            {
                "call": "Sendrecv",
                "shift": 0,
                "tag": 0,
                "any": True,
                "room": 0,
                "pattern": "ring",
                "counts": [[2]],
            },
            "none",
            "status",
        ),
    ],
)
def test_faults_are_found(fault, changes, policy, kind):
    draw: Draw = simplest(changes["call"], 1) | changes
    if draw["call"] == "Allgatherv":
        draw["counts"] = [[draw["n"]]]
    perform = exchange if draw["call"] == "Sendrecv" else collective
    plain = perform(draw, MPI.COMM_SELF)
    assert compare(draw, policy, plain, perform(draw, MPI.COMM_SELF)).kind == ""
    assert compare(draw, policy, plain, perform(draw, Faulty(fault))).kind == kind
