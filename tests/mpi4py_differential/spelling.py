"""Spell a message: which memory it has, and in which of mpi4py's forms it is given.

A spelling is a dictionary of small integers. Each says which of the choices that are right at its place is taken,
modulo their number; 0 is the plainest, which is where hypothesis shrinks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.mpi4py_differential.memory import (
    MAPPED,
    OPEN_MPI,
    Memory,
    Type,
    allocate,
    dtype_of,
    holders,
    integer,
    integers,
    orders,
    types_of,
)

CHOICES = ("order", "holder", "form", "type", "code", "counts", "displs", "gap", "extra", "sequence")
Spelling = dict[str, int]

# What mpi4py refuses on each rank before anything is sent.
REFUSED = [
    "strided",
    "reversed",
    "negative count",
    "five items",
    "unknown code",
    "no buffer",
    "displacement",
    "count of text",
]
_OF_ONE_COUNT = ("negative count", "displacement")  # MPI, not mpi4py, looks at those of several


@dataclass(frozen=True)
class Blocks:
    """Blocks of a message.

    Attributes:
        kind: ``simple`` for one count, ``vector`` for counts and displacements, ``w`` for types, too.
        elements: numbers of elements, by block; multiples of ``unit``.
        unit: elements in an entry of a datatype.
        basic: whether only basic types are right, as in reductions.
    """

    kind: str
    elements: tuple[int, ...]
    unit: int = 1
    basic: bool = False


@dataclass
class Buffer:
    """A buffer of one call.

    Attributes:
        message: what is given to the call.
        memory: where its elements are.
        blocks: indices in ``memory.view`` of each block's elements, in the order of the message.
        text: the spelling, for people.
        received: whether the call writes it.
        before: the bytes of the memory before the call.
    """

    message: Any
    memory: Memory
    blocks: list[np.ndarray]
    text: str
    received: bool = True
    before: bytes = b""

    def put(self, block: int, data: np.ndarray) -> None:
        """Write a block's elements; a read-only array is so for others."""
        flags = self.memory.view.flags
        writeable, flags.writeable = flags.writeable, True
        # As bytes: those between a long double's, or a structure's, are copied, too.
        bytes_ = np.dtype((np.void, data.dtype.itemsize))
        self.memory.view.view(bytes_)[self.blocks[block]] = data.view(bytes_)
        flags.writeable = writeable

    def snapshot(self) -> bytes:
        """Return all bytes of the memory."""
        return self.memory.storage.tobytes()


def _pick(options: Sequence[Any], index: int) -> Any:
    return options[index % len(options)]


@dataclass
class _Form:
    """Counts of a message as it says them: the words for it, each block's first entry, and the memory's entries."""

    name: str
    starts: list[int]
    entries: int

    @property
    def says_type(self) -> bool:
        return "type" in self.name


def build(
    blocks: Blocks,
    name: str,
    spelling: Spelling,
    data: Sequence[np.ndarray | None],
    *,
    send: bool,
    refused: str | None = None,
) -> Buffer:
    """Make a buffer with the blocks' data in it, and spell it.

    Args:
        blocks: the message's.
        name: type of the elements.
        spelling: which choices are taken.
        data: elements by block; None where the memory keeps what it is filled with.
        send: whether the buffer is only read.
        refused: one of ``REFUSED``, or "read-only", to spell it so that mpi4py refuses it.
    """
    if refused:
        blocks = Blocks(blocks.kind, blocks.elements, 1, True)
    if blocks.kind == "w":
        return _build_w(blocks, name, spelling, data, send=send, refused=refused)
    kind: Type = types_of(1)[0] if blocks.basic else _pick(types_of(blocks.unit), spelling["type"])
    counts = [n // (1 if blocks.basic else blocks.unit) for n in blocks.elements]
    form = (_vector_form if blocks.kind == "vector" else _simple_form)(blocks, counts, kind, name, spelling)
    where = [_indices(start, count, kind) for start, count in zip(form.starts, counts, strict=True)]
    length = form.entries * kind.extent
    order = _pick(orders(length, says_type=form.says_type), spelling["order"])
    if refused in ("strided", "reversed"):
        order = refused
    options = holders(name, order, says_type=form.says_type, send=send)
    if blocks.kind == "simple" and len(counts) == 1 and form.name in _WITH_COUNT and not blocks.basic:
        options.append("BOTTOM")
    holder = "array" if refused else _pick(options, spelling["holder"])
    memory = allocate(length, dtype_of(name), order, holder)
    made = Buffer(None, memory, where, "", not send)
    for block, elements in enumerate(data):
        if elements is not None:
            made.put(block, elements)
    if holder == "read-only array" or refused == "read-only":
        memory.view.flags.writeable = False
    if holder == "BOTTOM":
        _spell_absolute(made, form, counts[0], kind, name, spelling)
    else:
        _spell(made, form, counts, kind, name, spelling, vector=blocks.kind == "vector")
    if refused:
        _refuse(made, refused, name, blocks.kind)
    made.before = made.snapshot()
    return made


def _indices(start: int, count: int, kind: Type) -> np.ndarray:
    entries = (start + np.arange(count, dtype=np.int64)) * kind.extent
    return (entries[:, None] + np.array(kind.offsets, dtype=np.int64)).reshape(-1)


# -- forms: with "type", the message says it ------------------------------------------------------------

_WITH_COUNT = ("count, type", "(count, displ), type", "count, displ, type")


def _simple_form(blocks: Blocks, counts: list[int], kind: Type, name: str, spelling: Spelling) -> _Form:
    forms = ["type", *_WITH_COUNT, "None, type", "(None, displ), type"]
    if _mapped(blocks, kind, name):
        forms = ["", *forms, "count", "(count, displ)"]
    form = _pick(forms, spelling["form"])
    infers = "count" not in form
    # A displacement before several blocks whose count is inferred would leave a part of them.
    ahead = spelling["gap"] % 4 if "displ" in form and (not infers or len(counts) == 1) else 0
    behind = 0 if infers else spelling["extra"] % 3
    starts = [ahead + sum(counts[:i]) for i in range(len(counts))]
    return _Form(form, starts, ahead + sum(counts) + behind)


def _vector_form(blocks: Blocks, counts: list[int], kind: Type, name: str, spelling: Spelling) -> _Form:
    whole, ranks = sum(counts), len(counts)
    forms = ["(counts, displs), type", "counts, displs, type", "counts, type"]
    if _mapped(blocks, kind, name):
        forms += ["(counts, displs)", "counts"]
    if counts == [whole // max(ranks, 1) + (i < whole % max(ranks, 1)) for i in range(ranks)]:
        forms += ["type", "(None, None), type", *([""] if _mapped(blocks, kind, name) else [])]
    form = _pick(forms, spelling["form"])
    behind = spelling["extra"] % 3 if "counts" in form else 0
    after = [sum(counts[:i]) for i in range(ranks)]
    if "displs" not in form:
        return _Form(form, after, whole + behind)
    gap, which = spelling["gap"] % 4, range(ranks)
    style = spelling["displs"] % 4
    if style == 0:
        return _Form(form, after, whole + behind)
    if style == 1:
        stride = max(counts, default=0) + gap
        return _Form(form, [stride * i for i in which], stride * ranks + behind)
    starts, at = [0] * ranks, gap
    for i in reversed(which) if style == 2 else which:
        starts[i] = at
        at += counts[i] + gap
    return _Form(form, starts, at + behind)


def _mapped(blocks: Blocks, kind: Type, name: str) -> bool:
    """Return whether the type may be left out: bytes without one are MPI.BYTE, which has no sums."""
    return kind.kind == "basic" and name in MAPPED and not (blocks.basic and name == "u1")


# -- spellings ------------------------------------------------------------------------------------------


def _spell(
    made: Buffer, form: _Form, counts: list[int], kind: Type, name: str, spelling: Spelling, *, vector: bool
) -> None:
    memory = made.memory
    given = memory.given()
    parts: list[Any] = (_vector_parts if vector else _simple_parts)(form, counts, spelling)
    shown = [_shown(part) for part in parts]
    if form.says_type:
        coded = kind.kind == "basic" and name in MAPPED and spelling["code"] % 3 == 1
        parts.append(dtype_of(name).char if coded else kind.mpi(name))
        shown.append(repr(parts[-1]) if coded else str(kind))
    what = f"{memory.holder} of {memory.view.size} {name}, {memory.order}"
    made.message = given if not parts else (tuple if spelling["sequence"] % 2 else list)([given, *parts])
    made.text = f"{type(made.message).__name__}({what}; {'; '.join(shown)})" if parts else what
    memory.kept.append(given)


def _spell_absolute(made: Buffer, form: _Form, count: int, kind: Type, name: str, spelling: Spelling) -> None:
    memory = made.memory
    address = memory.view.ctypes.data + form.starts[0] * kind.extent * memory.view.itemsize
    absolute = kind.mpi(name).Create_hindexed([count], [address]).Commit()
    # One of an empty datatype is as much as none of another, but MPICH's own Scatter then waits for who sends none.
    n = min(1, count)
    parts: list[Any] = {"count, type": [n], "(count, displ), type": [(n, 0)]}.get(form.name, [n, 0])
    made.message = (tuple if spelling["sequence"] % 2 else list)([MPI.BOTTOM, *parts, absolute])
    made.text = f"[BOTTOM; {parts}; {count} of {kind} of {name} at an address]"


def _simple_parts(form: _Form, counts: list[int], spelling: Spelling) -> list[Any]:
    words = form.name.removesuffix("type").removesuffix(", ")
    count: Any = integer(counts[0] if counts else 0, spelling["counts"])
    ahead = integer(form.starts[0] if form.starts else 0, spelling["counts"] // 4)
    match words:
        case "count":
            return [count]
        case "None":
            return [None]
        case "count, displ":
            return [count, ahead]
        case "(count, displ)" | "(None, displ)":
            first = None if "None" in words else count
            return [(tuple if spelling["sequence"] // 2 % 2 else list)([first, ahead])]
    return []


def _vector_parts(form: _Form, counts: list[int], spelling: Spelling) -> list[Any]:
    words = form.name.removesuffix("type").removesuffix(", ")
    if not words:
        return []
    if "None" in words:
        return [(None, None)]
    how = spelling["counts"]
    said = integers(counts, how)
    if len(set(counts)) == 1 and how // 8 % 3 == 1:
        said = integer(counts[0], how)
    if words == "counts":
        return [list(said) if isinstance(said, tuple) else said]  # a tuple would be counts and displacements
    displs = integers(form.starts, how // 3)
    steps = {b - a for a, b in zip(form.starts, form.starts[1:], strict=False)}
    if form.starts == [sum(counts[:i]) for i in range(len(counts))] and spelling["displs"] // 4 % 3 == 1:
        displs = None
    elif len(steps) == 1 and form.starts[0] == 0 and min(steps) >= 0 and spelling["displs"] // 4 % 3 == 2:
        displs = integer(min(steps), how)
    return [(said, displs)] if words[0] == "(" else [said, displs]


def _shown(part: Any) -> str:
    if isinstance(part, np.ndarray | np.generic):
        return f"{part.dtype} {part.tolist()}"
    if isinstance(part, tuple | list):
        ends = "()" if isinstance(part, tuple) else "[]"
        return ends[0] + ", ".join(map(_shown, part)) + ends[1]
    return repr(part)


# -- one type for each block ----------------------------------------------------------------------------


def _build_w(
    blocks: Blocks,
    name: str,
    spelling: Spelling,
    data: Sequence[np.ndarray | None],
    *,
    send: bool,
    refused: str | None,
) -> Buffer:
    """Make a buffer of a message whose blocks have each their type and their displacement in bytes."""
    size = dtype_of(name).itemsize
    kinds: list[Type] = []
    counts, starts, where, at = [], [], [], spelling["gap"] % 4
    for i, elements in enumerate(blocks.elements):
        of = types_of(1)[:1] if blocks.basic else types_of(blocks.unit)
        kinds.append(_pick(of, spelling["type"] + i * spelling["code"]))
        counts.append(elements // len(kinds[-1].offsets))
        starts.append(at)
        where.append(_indices(0, counts[-1], kinds[-1]) + at)
        at += counts[-1] * kinds[-1].extent + spelling["extra"] % 3
    order = (
        refused
        if refused in ("strided", "reversed")
        else _pick(orders(at, says_type=True), spelling["order"])
    )
    options = [h for h in holders(name, order, says_type=True, send=send) if h != "array.array"]
    memory = allocate(at, dtype_of(name), order, "array" if refused else _pick(options, spelling["holder"]))
    made = Buffer(None, memory, where, "", not send)
    for block, elements_ in enumerate(data):
        if elements_ is not None:
            made.put(block, elements_)
    if memory.holder == "read-only array" or refused == "read-only":
        memory.view.flags.writeable = False
    given, types = memory.given(), [kind.mpi(name) for kind in kinds]
    memory.kept.append(given)
    displs = [start * size for start in starts]
    said, first = integers(counts, spelling["counts"]), integers(displs, spelling["counts"] // 3)
    if spelling["form"] % 3 == 1:
        made.message = [given, said, first, types]
    elif (
        spelling["form"] % 3 == 2 and memory.holder == "array" and not refused and not OPEN_MPI
    ):  # it takes none
        absolute = [memory.view.ctypes.data + d for d in displs]
        made.message = [MPI.BOTTOM, ([*counts], absolute), types]
    else:
        made.message = (given, (said, first), tuple(types))
    made.text = (
        f"{memory.holder} of {at} {name}, {memory.order}; counts {_shown(said)}, bytes {_shown(first)}, "
        f"types {', '.join(map(str, kinds))}{'; BOTTOM' if made.message[0] is MPI.BOTTOM else ''}"
    )
    if refused:
        _refuse(made, refused, name, blocks.kind)
    made.before = made.snapshot()
    return made


def _refuse(made: Buffer, refused: str, name: str, kind: str) -> None:
    """Change a message so that mpi4py refuses it."""
    if refused in ("strided", "reversed", "read-only"):
        made.text += f" ({refused})"
        return
    given, basic = made.memory.given(), types_of(1)[0].mpi(name)
    if refused in _OF_ONE_COUNT and kind != "simple":
        refused = "counts for 17 ranks"
    wrong: dict[str, Any] = {
        "negative count": [given, -1, basic],
        "five items": [given, 1, 0, basic, None],
        "unknown code": [given, "no such type"],
        "no buffer": 7,
        "displacement": [given, (1, 10**9), basic],
        "count of text": [given, "2", basic],
        "counts for 17 ranks": [given, [1] * 17, basic],
    }
    made.message, made.text = wrong[refused], refused
