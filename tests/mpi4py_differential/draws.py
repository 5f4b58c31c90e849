"""Draw calls: legal ones, whose ranks spell the same signature each in its way, and some that mpi4py refuses."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.mpi4py_differential.calls import ROWS, Draw, Row
from tests.mpi4py_differential.memory import MAPPED, OPEN_MPI, SUMMED, UNMAPPED
from tests.mpi4py_differential.messages import EXCHANGES, RECEIVES, SENDS
from tests.mpi4py_differential.spelling import CHOICES, REFUSED

# Entries of a block: none, one, odd, and so many that policies compress (4 KiB, 16 KiB and more).
SIZES = [1, 0, 2, 3, 5, 7, 64, 1031, 2048, 5003]
_TOPOLOGIES = ["ring", "line", "grid", "graph", "dist_graph"]
_PLAIN = dict.fromkeys(CHOICES, 0)
_ONE = st.tuples(*[st.integers(0, 23)] * len(CHOICES))


@st.composite
def spellings(draw: Any, ranks: int) -> list[dict[str, int]]:
    """Draw how each rank spells a buffer: plainly, all alike, or each in its way."""
    how = draw(st.sampled_from(["plain", "alike", "own"]))
    if how == "plain":
        return [_PLAIN] * ranks
    drawn = [draw(_ONE)] * ranks if how == "alike" else [draw(_ONE) for _ in range(ranks)]
    return [dict(zip(CHOICES, choices, strict=True)) for choices in drawn]


def simplest(call: str, ranks: int) -> Draw:
    """Return a call of one small block of plain arrays."""
    row = ROWS.get(call)
    made: Draw = {
        "call": call,
        "mode": "",
        "ranks": ranks,
        "unit": 1,
        "n": 2,
        "root": 0,
        "dtype": "f4",
        "values": "small" if row is not None and row.reduces else "normal",
        "seed": 0,
        "named": False,
        "in_place": False,
        "send": [_PLAIN] * ranks,
        "recv": [_PLAIN] * ranks,
        "refused": None,
        "refused_side": "",
        "alone": None,
        "op": "SUM",
        "topology": "ring",
        "counts": None,
        "counts_inferred": False,
    }
    if row is not None and row.vector and not row.neighbours:
        made["counts"] = [[2] * ranks] * (ranks if call.startswith("Alltoall") else 1)
    return made


@st.composite
def draws(draw: Any, ranks: int, calls: list[str]) -> Draw:
    """Draw a call of a table's rows or of messages."""
    call = draw(st.sampled_from(calls))
    row = ROWS.get(call)
    reduces = row is not None and row.reduces
    unit = 1 if reduces else draw(st.sampled_from([1, 1, 2, 3]))
    n = draw(st.sampled_from(SIZES)) * unit
    made = simplest(call, ranks) | {
        "mode": draw(st.sampled_from(["", "I", *([] if call in EXCHANGES else ["_init"])])),
        "unit": unit,
        "n": n,
        "root": draw(st.integers(0, ranks - 1)),
        "dtype": draw(st.sampled_from(SUMMED if reduces else [*MAPPED, *UNMAPPED])),
        "values": "small" if reduces else draw(st.sampled_from(["normal", "normal", "wild"])),
        "seed": draw(st.integers(0, 99)),
        "named": draw(st.booleans()),
        "in_place": bool(row is not None and row.in_place and draw(st.sampled_from([False, False, True]))),
        "send": draw(spellings(ranks)),
        "recv": draw(spellings(ranks)),
    }
    # Of 20 KB and more, MPICH 5's own Allgatherv hangs or aborts where elements have gaps; of 100 KB an assertion in
    # Sendrecv_replace fails.
    if made["dtype"] in ("g", "G") or call == "Allgatherv":
        n = made["n"] = min(n, (64 if made["dtype"] in ("g", "G") else 1031) * unit)
    if made["dtype"] in ("packed", "aligned"):  # of 1,000, MPICH 5's own receives raise MPI.ERR_TYPE
        n = made["n"] = min(n, 64 * unit)
    if made["dtype"] in UNMAPPED or made["dtype"] == "b1":
        made["values"] = {"b1": "normal"}.get(made["dtype"], "wild")
    if reduces:
        made["op"] = draw(st.sampled_from(_ops(made["dtype"])))
    if row is not None and row.neighbours:
        made["topology"] = draw(st.sampled_from(_TOPOLOGIES))
        _avoid_both_ways(made)
    if row is None:
        _of_messages(draw, made)
    elif row.vector and not row.neighbours:
        made["counts"] = draw(_counts(row, ranks, unit, n, in_place=made["in_place"]))
        made["counts_inferred"] = draw(st.booleans())
    _refuse(draw, made, row)
    return made


def _avoid_both_ways(made: Draw) -> None:
    """Draw nothing that Open MPI 5 does wrong: all but its blocking calls mix up the two directions to one rank."""
    closed = {"ring": made["ranks"] == 2, "grid": made["ranks"] in (2, 4)}.get(made["topology"], False)
    if not (OPEN_MPI and closed and made["call"].startswith("Neighbor_alltoall")):
        return
    made["mode"] = ""
    if made["call"] == "Neighbor_alltoallw" or made["dtype"] in ("packed", "aligned"):
        made["topology"] = "line"  # ours are Open MPI's non-blocking ones


def _ops(dtype: str) -> list[str]:
    if dtype[0] in "iu":
        return ["SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "LAND"]
    return ["SUM", "PROD"] if dtype[0] == "c" else ["SUM", "PROD", "MAX", "MIN"]


@st.composite
def _counts(draw: Any, row: Row, ranks: int, unit: int, n: int, *, in_place: bool) -> list[list[int]]:
    """Draw what each rank sends to each, in elements: one row where it is the same for all senders."""
    some = st.sampled_from([n, 0, unit, 2 * unit, 5 * unit])
    if not row.name.startswith("Alltoall"):
        even = draw(st.booleans())
        return [[n] * ranks if even else [draw(some) for _ in range(ranks)]]
    drawn = [[draw(some) for _ in range(ranks)] for _ in range(ranks)]
    if in_place:  # as much back as forth
        drawn = [[drawn[min(i, j)][max(i, j)] for j in range(ranks)] for i in range(ranks)]
    return drawn


def _of_messages(draw: Any, made: Draw) -> None:
    """Draw what calls from rank to rank have besides."""
    ranks, unit, n = made["ranks"], made["unit"], made["n"]
    call, some = made["call"], st.sampled_from([n, 0, unit, 3 * unit])
    made["shift"] = draw(st.integers(0, ranks - 1))
    made["tag"] = draw(st.integers(0, 3))
    made["any"] = draw(st.booleans())
    made["room"] = draw(st.sampled_from([0, 0, 1, 3]))
    made["in_place"] = False
    if call in EXCHANGES:
        if call == "Sendrecv_replace" and made["mode"] == "I":
            # Of gaps and of MPI.BOTTOM, which is the last holder of more than two, MPICH 5's own dies by SIGSEGV.
            made["unit"] = unit = 1
            made["recv"] = [
                {**spelling, "type": 0, "holder": spelling["holder"] % 2} for spelling in made["recv"]
            ]
            made["dtype"] = "packed" if made["dtype"] == "aligned" else made["dtype"]
            n = made["n"]
        made["pattern"] = draw(st.sampled_from(["ring", "line"]))
        made["counts"] = [[n] if call == "Sendrecv_replace" else [draw(some)] for _ in range(ranks)]
        return
    number = draw(st.integers(1, 3))
    made["counts"] = [[draw(some) for _ in range(number)] for _ in range(ranks)]
    made["sender"] = draw(st.sampled_from(SENDS))
    if made["sender"] == "Bsend" and made["dtype"] in ("packed", "aligned"):
        made["dtype"] = "f4"  # of 3,000 structures a rank's own receive in MPICH 5 raises MPI.ERR_TYPE
    made["receive_mode"] = draw(st.sampled_from(["", "I", *(["_init"] if call == "Recv" else [])]))
    starts_first = call == "Recv" and made["receive_mode"] != ""
    if made["sender"] == "Rsend" and not starts_first:
        made["sender"] = "Send"  # a receive must be there before
    free = starts_first or made["mode"] != "" or made["sender"] == "Bsend"
    made["pattern"] = draw(st.sampled_from(["pair", *(["ring", "line"] if free else [])]))


def _refuse(draw: Any, made: Draw, row: Row | None) -> None:
    """Have some calls spelled so that each rank finds the error by itself, or one rank alone."""
    share = draw(st.integers(0, 15))
    if share < 14 or made["call"] == "Barrier":
        return
    if row is None:
        # Of messages, the receive is not reached, or is still open, where the send is refused.
        if made["call"] not in EXCHANGES or made["pattern"] != "ring":
            return
        sides: list[str] = ["recv"] if made["call"] == "Sendrecv_replace" else ["send", "recv"]
    elif share == 14:
        refuse_alone(made, row, draw(st.integers(0, made["ranks"] - 1)), draw(st.integers(0, 99)))
        return
    else:
        sides = list(row.refusable)
        if made["in_place"] and row.rooted:
            made["in_place"] = False
        elif made["in_place"]:
            sides = ["recv"]
    _refuse_side(made, draw(st.sampled_from(sides)), draw(st.integers(0, 99)))


def _refuse_side(made: Draw, side: str, which: int) -> None:
    kinds = [*REFUSED, *(["read-only"] if side == "recv" and made["call"] != "Bcast" else [])]
    made["refused_side"], made["refused"] = side, kinds[which % len(kinds)]
    _move_something(made)


def _move_something(made: Draw) -> None:
    """Have no block be empty: of nothing ranks need not tell each other."""
    made["n"] = max(made["n"], 2 * made["unit"])
    if made["counts"]:
        made["counts"] = [[max(c, 2 * made["unit"]) for c in row] for row in made["counts"]]


def refuse_alone(made: Draw, row: Row, rank: int, which: int) -> None:
    """Have a call's arguments wrong on one rank.

    Args:
        made: the call.
        row: its row.
        rank: the rank; the root where the others' arguments are not looked at.
        which: the wrong argument, modulo their number.
    """
    made["alone"] = rank
    sides = [*row.refusable, *(["other"] if row.rooted or row.reduces else [])]
    at_root = {"Gather": "recv", "Gatherv": "recv", "Reduce": "recv", "Scatter": "send", "Scatterv": "send"}
    if rank == made["root"] and row.name in at_root:
        sides.append(at_root[row.name])
    made["in_place"] = False
    made["topology"] = "ring"
    side = sides[which % len(sides)]
    if side == "other":
        made["refused_side"] = side
        made["refused"] = "root" if row.rooted and (not row.reduces or which % 2) else "operator"
        _move_something(made)
    else:
        _refuse_side(made, side, which // len(sides))
        if made["call"] == "Bcast" and rank == made["root"] and made["refused"] == "read-only":
            made["refused"] = "strided"


CALLS = [*ROWS, *RECEIVES, *EXCHANGES]
