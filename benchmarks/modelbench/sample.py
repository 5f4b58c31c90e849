"""Draw the cells to which the model of collectives is fitted, and others by which it is judged."""

from __future__ import annotations

import random
from typing import Any

LINKS = ("200mbit", "1gbit", "none")
PLACES = ((4, 1), (2, 2), (4, 2))  # hosts, ranks on each
_PLAIN = "none"
_CODECS = (_PLAIN, "int8", "int4", "bf16", "exponent", "topk:ratio=0.01")
_ALGORITHMS = {
    "all_reduce": ("direct", "one_shot", "ring", "halving", "hierarchical"),
    "reduce_scatter": ("direct", "ring", "hierarchical"),
    "all_gather": ("direct", "ring", "doubling", "hierarchical"),
    "broadcast": ("tree", "direct", "scatter"),
    "reduce": ("direct",),
    "all_to_all": ("direct",),
    "send": ("direct",),
}
_SIZES = tuple(1 << power for power in range(12, 25))  # 4 KiB to 16 MiB
_MOST_WIRE = 24 << 20  # most bytes that a cell may send over its busiest link at 1 Gb/s
_EACH = 26  # cells for each link and place


def cells(link: str, hosts: int, ppn: int, *, unseen: bool) -> list[dict[str, Any]]:
    """Return the cells of a link and a place: those to fit, or those that the fit has not seen."""
    draw = random.Random(f"{link} {hosts} {ppn} {unseen}")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    limit = _MOST_WIRE if link != "200mbit" else _MOST_WIRE // 4
    while len(found) < _EACH:
        op = draw.choice(("all_reduce", "all_reduce", *_ALGORITHMS))
        algorithm = draw.choice(_ALGORITHMS[op])
        # Other operations on plain values are MPI's own.
        codecs = _CODECS if op in ("all_reduce", "send") else _CODECS[1:]
        codec, nbytes = draw.choice(codecs), draw.choice(_SIZES)
        # Sizes of the cells to fit are powers of two, those of the unseen cells lie between.
        nbytes = nbytes * 3 // 4 if unseen else nbytes
        if nbytes * ppn * (1.0 if codec == _PLAIN else 0.5) * 2 > limit:
            continue
        if algorithm == "hierarchical" and ppn == 1:
            continue
        key = (op, algorithm, codec, nbytes)
        found[key] = dict(zip(("op", "algorithm", "codec", "nbytes"), key, strict=True))
    return [cell | {"link": link, "hosts": hosts, "ppn": ppn} for cell in found.values()]
