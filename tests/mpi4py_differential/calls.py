"""The table of calls, and how a rank makes one of a description.

A description (:data:`Draw`) is a dictionary that JSON can hold: ``call`` (a row's name), ``mode`` ("", "I", "_init"),
``ranks``, ``dtype``, ``n`` (elements of a block), ``unit`` (elements of an entry of a derived type), ``root``, ``op``,
``in_place``, ``counts`` (elements by sender and receiver), ``values``, ``seed``, ``send`` and ``recv`` (a spelling for
each rank), ``refused`` and ``refused_side`` (what mpi4py does not take, in which buffer), ``alone`` (the one rank that
has it; None for all), ``topology``, and those of messages in ``messages.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi4py_differential.memory import FILL, LOSSY, dtype_of, integers
from tests.mpi4py_differential.spelling import Blocks, Buffer, build

Draw = dict[str, Any]
TIMES = 2  # that a persistent operation is started
OPS = {
    "SUM": MPI.SUM,
    "PROD": MPI.PROD,
    "MAX": MPI.MAX,
    "MIN": MPI.MIN,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "LAND": MPI.LAND,
}


@dataclass
class Outcome:
    """Outcome of a call on a rank.

    Attributes:
        before: bytes of each buffer before the last start.
        after: the same afterwards.
        buffers: the buffers.
        statuses: what statuses said, in order.
        error: the error, if one was raised.
    """

    buffers: list[Buffer] = field(default_factory=list)
    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    statuses: list[Any] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True)
class Row:
    """A collective of the table.

    Attributes:
        name: the method.
        refusable: which buffers all ranks look at before anything is sent: "send", "recv".
        in_place: whether MPI.IN_PLACE is taken.
        rooted: whether it has a root.
        reduces: whether it has an operator.
        vector: whether ranks' blocks have their own counts.
        neighbours: whether it takes a topology.
        alike: whether all ranks receive the same.
    """

    name: str
    refusable: tuple[str, ...]
    in_place: bool = False
    rooted: bool = False
    reduces: bool = False
    vector: bool = False
    neighbours: bool = False
    alike: bool = False


_BOTH = ("send", "recv")
ROWS = {
    row.name: row
    for row in [
        Row("Allreduce", _BOTH, in_place=True, reduces=True, alike=True),
        Row("Bcast", ("recv",), rooted=True, alike=True),
        Row("Reduce", ("send",), in_place=True, rooted=True, reduces=True),
        Row("Allgather", _BOTH, in_place=True, alike=True),
        Row("Allgatherv", _BOTH, in_place=True, vector=True, alike=True),
        Row("Alltoall", _BOTH, in_place=True),
        Row("Alltoallv", _BOTH, in_place=True, vector=True),
        Row("Alltoallw", _BOTH, in_place=True, vector=True),
        Row("Gather", ("send",), in_place=True, rooted=True),
        Row("Gatherv", ("send",), in_place=True, rooted=True, vector=True),
        Row("Scatter", ("recv",), in_place=True, rooted=True),
        Row("Scatterv", ("recv",), in_place=True, rooted=True, vector=True),
        Row("Reduce_scatter_block", _BOTH, in_place=True, reduces=True),
        Row("Reduce_scatter", _BOTH, in_place=True, reduces=True, vector=True),
        Row("Scan", _BOTH, in_place=True, reduces=True),
        Row("Exscan", _BOTH, in_place=True, reduces=True),
        Row("Barrier", ()),
        Row("Neighbor_allgather", _BOTH, neighbours=True),
        Row("Neighbor_allgatherv", _BOTH, neighbours=True, vector=True),
        Row("Neighbor_alltoall", _BOTH, neighbours=True),
        Row("Neighbor_alltoallv", _BOTH, neighbours=True, vector=True),
        Row("Neighbor_alltoallw", _BOTH, neighbours=True, vector=True),
    ]
}


def values(draw: Draw, rank: int, block: int, n: int, time: int = 0) -> np.ndarray:
    """Return a block's elements as a rank sends them."""
    dtype = dtype_of(draw["dtype"])
    random = np.random.default_rng([draw["seed"], rank, block, time])
    drawn = _values(draw, dtype, random, n)
    if draw["dtype"] in ("g", "G"):
        drawn.view(np.uint8).reshape(-1, np.dtype("g").itemsize)[:, 10:] = 0  # bytes without a meaning
    return drawn


def _values(draw: Draw, dtype: np.dtype[Any], random: np.random.Generator, n: int) -> np.ndarray:
    if draw["values"] == "small":
        drawn = random.integers(0 if dtype.kind == "u" else -4, 5, n)
        if dtype.kind == "c":
            return (drawn + 1j * random.integers(-4, 5, n)).astype(dtype)
        return drawn.astype(dtype)
    if draw["dtype"] == "b1":
        return random.integers(0, 2, n).astype(dtype)
    if draw["values"] == "normal" and draw["dtype"] in LOSSY:
        parts = LOSSY[draw["dtype"]]
        real: np.ndarray = (
            random.uniform(-4.0, 4.0, n * parts).astype(f"f{dtype.itemsize // parts}").view(dtype)
        )
        return real
    if draw["dtype"] in ("g", "G"):
        return random.uniform(-4.0, 4.0, n).astype(dtype)
    return np.frombuffer(bytearray(random.bytes(n * dtype.itemsize)), np.uint8).view(dtype)


# -- which blocks a rank sends and receives ---------------------------------------------------------------


@dataclass
class Sides:
    """Buffers that a rank gives, to send and to receive: blocks, None for no buffer, "in place" for MPI's constant.

    Attributes:
        send: blocks that are sent.
        recv: blocks that are received.
        placed: by receive block, whose data an operation in place finds there: the rank, and the block's number.
    """

    send: Blocks | str | None
    recv: Blocks | str | None
    placed: dict[int, tuple[int, int]] = field(default_factory=dict)


def sides(draw: Draw, rank: int, indegree: int = 0, outdegree: int = 0) -> Sides:
    """Return what a rank gives to a collective."""
    row, size, n, unit = ROWS[draw["call"]], draw["ranks"], draw["n"], draw["unit"]
    counts = draw.get("counts") or []
    at_root, in_place = rank == draw["root"], draw["in_place"]
    one = Blocks("simple", (n,), unit, row.reduces)
    all_ = Blocks("simple", (n,) * size, unit, row.reduces)
    match row.name:
        case "Bcast":
            return Sides(None, one, {0: (rank, 0)} if at_root else {})
        case "Allreduce" | "Scan" | "Exscan":
            return Sides("in place", one, {0: (rank, 0)}) if in_place else Sides(one, one)
        case "Reduce":
            if not at_root:
                return Sides(one, None)
            return Sides("in place", one, {0: (rank, 0)}) if in_place else Sides(one, one)
        case "Reduce_scatter_block":
            own = {i: (rank, i) for i in range(size)}
            return Sides("in place", all_, own) if in_place else Sides(all_, one)
        case "Reduce_scatter":
            whole = Blocks("simple", (sum(counts[0]),), 1, True)
            if in_place:
                return Sides("in place", whole, {0: (rank, 0)})
            return Sides(whole, Blocks("simple", (counts[0][rank],), 1, True))
        case "Allgather" | "Gather":
            if row.name == "Gather" and not at_root:
                return Sides(one, None)
            return Sides("in place", all_, {rank: (rank, 0)}) if in_place else Sides(one, all_)
        case "Allgatherv" | "Gatherv":
            mine = Blocks("simple", (counts[0][rank],), unit)
            every = Blocks("vector", tuple(counts[0]), unit)
            if row.name == "Gatherv" and not at_root:
                return Sides(mine, None)
            return Sides("in place", every, {rank: (rank, 0)}) if in_place else Sides(mine, every)
        case "Scatter":
            if not at_root:
                return Sides(None, one)
            return Sides(all_, "in place" if in_place else one)
        case "Scatterv":
            mine = Blocks("simple", (counts[0][rank],), unit)
            if not at_root:
                return Sides(None, mine)
            return Sides(Blocks("vector", tuple(counts[0]), unit), "in place" if in_place else mine)
        case "Alltoall":
            own = {i: (rank, i) for i in range(size)}
            return Sides("in place", all_, own) if in_place else Sides(all_, all_)
        case "Alltoallv" | "Alltoallw":
            kind = "w" if row.name == "Alltoallw" else "vector"
            get = Blocks(kind, tuple(counts[i][rank] for i in range(size)), unit)
            own = {i: (rank, i) for i in range(size)}
            return (
                Sides("in place", get, own)
                if in_place
                else Sides(Blocks(kind, tuple(counts[rank]), unit), get)
            )
        case "Neighbor_allgather" | "Neighbor_allgatherv":
            kind = "vector" if row.vector else "simple"
            return Sides(one, Blocks(kind, (n,) * indegree, unit))
        case "Neighbor_alltoall" | "Neighbor_alltoallv" | "Neighbor_alltoallw":
            kind = {"v": "vector", "w": "w"}.get(row.name[-1], "simple")
            return Sides(Blocks(kind, (n,) * outdegree, unit), Blocks(kind, (n,) * indegree, unit))
    return Sides(None, None)


# -- calls ------------------------------------------------------------------------------------------------


def method(draw: Draw) -> str:
    """Return the name of a draw's method."""
    name: str = draw["call"]
    return {"": name, "I": "I" + name[0].lower() + name[1:], "_init": name + "_init"}[draw["mode"]]


def status_of(status: MPI.Status, base: MPI.Datatype) -> list[int]:
    """Return what a status says."""
    return [
        status.Get_source(),
        status.Get_tag(),
        status.Get_count(base),
        status.Get_elements(base),
        int(status.Is_cancelled()),
    ]


def collective(draw: Draw, comm: MPI.Intracomm, indegree: int = 0, outdegree: int = 0) -> Outcome:
    """Make a collective call on this rank, which has so many neighbours if the call is for those."""
    row, rank = ROWS[draw["call"]], MPI.COMM_WORLD.rank
    give = sides(draw, rank, indegree, outdegree)
    outcome = Outcome()
    send = _argument(draw, "send", give.send, rank, outcome, {}, sent=True)
    from_here = row.name == "Bcast" and rank == draw["root"]
    recv = _argument(draw, "recv", give.recv, rank, outcome, give.placed, sent=from_here)
    arguments: list[Any] = [] if row.name == "Barrier" else [recv] if row.name == "Bcast" else [send, recv]
    named: dict[str, Any] = {}
    if row.name == "Reduce_scatter":
        counts = draw["counts"][0]
        inferred = draw["counts_inferred"] and not draw["in_place"] and not draw["refused"]
        arguments.append(None if inferred else integers(counts, draw["recv"][rank]["counts"]))
    wrong = draw["refused"] if draw["refused_side"] == "other" and draw["alone"] == rank else None
    if row.reduces:
        arguments.append("SUM" if wrong == "operator" else OPS[draw["op"]])
    if row.rooted:
        arguments.append(draw["ranks"] + 3 if wrong == "root" else draw["root"])
    if draw["named"]:
        named = dict(zip(_names(row), arguments, strict=True))
        arguments = []
    outcome.before = [b.before for b in outcome.buffers]
    try:
        made = getattr(comm, method(draw))(*arguments, **named)
        if draw["mode"] == "I":
            _wait(made, draw, outcome)
        elif draw["mode"] == "_init":
            _again(made, draw, give, rank, outcome)
    except Exception as error:
        outcome.error = error
    outcome.after = [b.snapshot() for b in outcome.buffers]
    return outcome


def _names(row: Row) -> list[str]:
    if row.name == "Barrier":
        return []
    names = ["buf"] if row.name == "Bcast" else ["sendbuf", "recvbuf"]
    names += ["recvcounts"] if row.name == "Reduce_scatter" else []
    return names + (["op"] if row.reduces else []) + (["root"] if row.rooted else [])


def _argument(
    draw: Draw,
    side: str,
    blocks: Blocks | str | None,
    rank: int,
    outcome: Outcome,
    placed: dict[int, tuple[int, int]],
    *,
    sent: bool,
) -> Any:
    if blocks is None:
        return None
    if isinstance(blocks, str):
        return MPI.IN_PLACE
    refused = draw["refused"] if draw["refused_side"] == side and draw["alone"] in (None, rank) else None
    data: list[np.ndarray | None] = [
        values(draw, *placed[i], n) if i in placed else None for i, n in enumerate(blocks.elements)
    ]
    if side == "send":
        allgather = ROWS[draw["call"]].name.startswith("Neighbor_allgather")
        data = [values(draw, rank, 0 if allgather else i, n) for i, n in enumerate(blocks.elements)]
    made = build(blocks, draw["dtype"], draw[side][rank], data, send=sent, refused=refused)
    outcome.buffers.append(made)
    return made.message


def _wait(request: Any, draw: Draw, outcome: Outcome) -> None:
    if draw["named"] or draw["alone"] is not None:
        request.Wait()
        return
    while not request.Test():
        pass


def _again(request: Any, draw: Draw, give: Sides, rank: int, outcome: Outcome) -> None:
    """Start a persistent operation, and once more with other data."""
    for time in range(TIMES):
        if time:
            refill(draw, give, rank, outcome.buffers, time)
            outcome.before = [b.before for b in outcome.buffers]
        request.Start()
        request.Wait()
    request.Free()


def refill(draw: Draw, give: Sides, rank: int, buffers: Sequence[Buffer], time: int) -> None:
    """Write other data where this rank's are, and none where it receives; bytes keep theirs."""
    held = iter(buffers)
    for side, blocks in (("send", give.send), ("recv", give.recv)):
        if not isinstance(blocks, Blocks):
            continue
        made = next(held)
        if made.memory.holder == "bytes":
            continue
        for i, n in enumerate(blocks.elements):
            if side == "send":
                made.put(i, values(draw, rank, i, n, time))
            elif i in give.placed:
                made.put(i, values(draw, *give.placed[i], n, time))
            else:  # what a lossy policy has made of the first start's differs
                made.put(
                    i, np.full(n * made.memory.view.itemsize, FILL, np.uint8).view(made.memory.view.dtype)
                )
        made.before = made.snapshot()
