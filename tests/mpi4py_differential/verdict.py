"""Say whether what a call did under a policy is what it did on plain mpi4py."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi4py_differential.calls import ROWS, Draw, Outcome, Row
from tests.mpi4py_differential.memory import LOSSY, dtype_of
from tests.mpi4py_differential.spelling import Buffer

BOUND = 1e-3
TOLD = 3.0  # seconds within which all ranks have the error of one
# By policy: messages below so many bytes are exact, and what others may be off by in units of the largest element; None
# where all are exact.
POLICIES: dict[str, tuple[int, float | None]] = {
    "none": (0, None),
    "exact": (0, None),
    "int8": (4096, 0.03),
    f"bounded:abs={BOUND:g}": (4096, 0.0),
    "hybrid": (16384, 0.03),
}
_LARGEST = 4.0  # of what calls.values gives
_HYBRID = ("Allreduce", "Reduce_scatter", "Reduce_scatter_block")  # what it compresses on the default axis


@dataclass
class Verdict:
    """Verdict of a rank on a call.

    Attributes:
        kind: what went wrong, in a word or two; empty if nothing did.
        text: the same in detail.
        error: names of the error's classes, from its own on; empty if none was raised.
        digest: of what was received, where all ranks receive the same.
        buffers: how each buffer is spelled.
    """

    kind: str = ""
    text: str = ""
    error: tuple[str, ...] = ()
    digest: str = ""
    buffers: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return it as a dictionary."""
        return asdict(self)


def names(error: BaseException | None) -> tuple[str, ...]:
    """Return the names of an error's classes; MPI's have the class of their code, too."""
    if error is None:
        return ()
    found = [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException, Exception)]
    if isinstance(error, MPI.Exception):
        found.insert(0, f"MPI error class {error.Get_error_class()}")
    return tuple(found)


def tolerance(draw: Draw, policy: str) -> float | None:
    """Return how far an element may be from plain mpi4py's; None where it has its bits."""
    least, share = POLICIES[policy]
    row = ROWS.get(draw["call"])
    if share is None or draw["dtype"] not in LOSSY or (policy == "hybrid" and draw["call"] not in _HYBRID):
        return None
    if _largest_message(draw, row) * dtype_of(draw["dtype"]).itemsize < least:
        return None
    if not share:
        return BOUND
    largest, ranks = _LARGEST, draw["ranks"]
    if row is not None and row.reduces:
        largest = {"SUM": largest * ranks, "PROD": (largest * 2**0.5) ** ranks}.get(draw["op"], largest)
    return share * largest * ranks


def _largest_message(draw: Draw, row: Row | None) -> int:
    """Return the elements of the largest message, or of all that a rank has of an operation."""
    counts: list[list[int]] = draw["counts"]
    if row is None:
        return max(map(max, counts))
    if row.name in ("Allreduce", "Reduce", "Scan", "Exscan", "Bcast"):
        elements: int = draw["n"]
        return elements
    if not counts:
        return 4 * draw["n"] if row.neighbours else draw["n"] * draw["ranks"]
    return max(*map(sum, counts), *map(sum, zip(*counts, strict=True)))


def compare(draw: Draw, policy: str, plain: Outcome, ours: Outcome) -> Verdict:
    """Compare two outcomes of this rank."""
    verdict = Verdict(error=names(ours.error), buffers=tuple(b.text for b in ours.buffers))
    expected = names(plain.error)
    if expected or verdict.error:
        verdict.kind = _of_errors(expected, verdict.error)
        verdict.text = f"plain: {plain.error!r}\nours: {ours.error!r}" if verdict.kind else ""
        if verdict.kind or not expected:
            return verdict
    allowed = tolerance(draw, policy)
    for number, buffer in enumerate(ours.buffers):
        kind, text = _of_memory(draw, plain, ours, number, buffer, allowed)
        if kind:
            verdict.kind, verdict.text = kind, f"buffer {number} ({buffer.text}): {text}"
            return verdict
    if plain.statuses != ours.statuses:
        verdict.kind = "status"
        verdict.text = (
            f"(source, tag, count, elements, cancelled): {plain.statuses} plain, {ours.statuses} ours"
        )
    row = ROWS.get(draw["call"])
    if row is not None and row.alike and draw["dtype"] in LOSSY and ours.buffers and not ours.error:
        last = ours.buffers[-1]
        if last.received:
            found = last.memory.view[np.concatenate(last.blocks)] if last.blocks else last.memory.view[:0]
            verdict.digest = hashlib.sha256(found.tobytes()).hexdigest()
    return verdict


def of_one_error(draw: Draw, rank: int, ours: Outcome, expected: tuple[str, ...], seconds: float) -> Verdict:
    """Say whether a rank did right in a call whose arguments are wrong on one rank alone.

    Args:
        draw: the call.
        rank: this one.
        ours: what happened here.
        expected: names of the classes of the error that mpi4py raises for this rank's arguments.
        seconds: how long the call took.
    """
    verdict = Verdict(error=names(ours.error), buffers=tuple(b.text for b in ours.buffers))
    verdict.text = f"{ours.error!r} after {seconds:.2f} s"
    if draw["alone"] == rank:
        verdict.kind = _of_errors(expected, verdict.error)
        verdict.text += f" for {expected}"
    elif verdict.error and "RemoteError" not in verdict.error:
        verdict.kind = f"told {_own(verdict.error)}"
    elif not verdict.error and _needs(draw, rank):
        verdict.kind = "not told"
    elif seconds > TOLD:
        verdict.kind = "told late"
    return verdict


def _needs(draw: Draw, rank: int) -> bool:
    """Return whether a rank cannot end a call well without the one whose arguments are wrong; others may have."""
    alone, root = draw["alone"], draw["root"]
    if draw["call"] in ("Gather", "Gatherv", "Reduce"):
        return bool(rank == root)
    if draw["call"] in ("Bcast", "Scatter", "Scatterv"):
        return bool(alone == root)
    if draw["call"] in ("Scan", "Exscan"):
        return bool(alone < rank)
    return not ROWS[draw["call"]].neighbours or draw["ranks"] <= 3  # on a ring


def _of_errors(expected: tuple[str, ...], found: tuple[str, ...]) -> str:
    if not expected:
        return f"raises {_own(found)}"
    if not found:
        return f"raises no {_own(expected)}"
    same = expected[0] in found
    return "" if same else f"raises {_own(found)} for {_own(expected)}"


def _own(error: tuple[str, ...]) -> str:
    return error[0]


def _meant(draw: Draw, buffer: Buffer, data: bytes) -> np.ndarray:
    """Return a buffer's bytes without what means nothing.

    MPI writes anything to the last bytes of long doubles. Whether a zero in a product of complex numbers is negative
    depends on the order of the factors, which MPI leaves open.
    """
    found = np.frombuffer(bytearray(data), np.uint8)
    elements = found[buffer.memory.offset :][: buffer.memory.view.nbytes]
    if draw["dtype"] in ("g", "G"):
        elements.reshape(-1, np.dtype("g").itemsize)[:, 10:] = 0
    elif draw["dtype"][0] == "c" and draw["op"] == "PROD":
        parts = elements.view(f"f{dtype_of(draw['dtype']).itemsize // 2}")
        parts[parts == 0] = 0
    return found


def _of_memory(
    draw: Draw, plain: Outcome, ours: Outcome, number: int, buffer: Buffer, allowed: float | None
) -> tuple[str, str]:
    """Return what is wrong with a buffer's bytes."""
    expected, found, before, before_plain = (
        _meant(draw, buffer, data)
        for data in (plain.after[number], ours.after[number], ours.before[number], plain.before[number])
    )
    if before.tobytes() != before_plain.tobytes():
        return "test", "the two calls had other data"
    if expected.tobytes() == found.tobytes():
        return "", ""
    view, offset = buffer.memory.view, buffer.memory.offset
    size = view.itemsize
    unlike = np.flatnonzero(expected != found)
    # Of a broadcast that is compressed the root, too, gets the decoded values, so that all ranks have the same.
    if not buffer.received and draw["call"] != "Bcast":
        return "send buffer written", f"from byte {unlike[0] - offset} on"
    of = (unlike - offset) // size
    inside = np.zeros(view.size, bool)
    for block in buffer.blocks:
        inside[block] = True
    outside = (unlike < offset) | (of >= view.size)
    outside[~outside] = ~inside[of[~outside]]
    if outside.any():
        return "gap written", f"byte {unlike[outside][0] - offset}, outside of all blocks"
    elements = np.unique(of)
    want, got = (a[offset : offset + view.nbytes].view(view.dtype) for a in (expected, found))
    first = elements[0]
    is_, for_ = (repr(array[first])[:60] for array in (got, want))
    said = f"element {first} of {view.size} is {is_} for {for_}, {elements.size} differ"
    if allowed is None:
        return "values", said
    was = before[offset : offset + view.nbytes].view(view.dtype)
    still = want[elements].tobytes() == was[elements].tobytes()
    # Rounded where they were: of a broadcast at its root, and of what a rank replaces by its own data.
    if still and not draw["in_place"] and draw["call"] not in ("Bcast", "Sendrecv_replace"):
        return "written too much", said
    parts = f"f{size // LOSSY[draw['dtype']]}"
    want_, got_ = (np.ascontiguousarray(a[elements]).view(parts).astype(np.float64) for a in (want, got))
    off = np.abs(want_ - got_)
    limit = allowed * (1 + 1e-6) + 4 * np.finfo(parts).eps * np.abs(want_)
    if (off <= limit).all():
        return "", ""
    return "bound", f"{said}, off by {np.nanmax(off):g} where {allowed:g} is allowed"
