"""Name the place in a model to which a message belongs, for policies that tell places apart.

A program says it around its operations; a thread says it for itself. Places that are not said are None, and rules that
ask for them then do as if they did not. Programs that train by hooks, which begin and end in two calls, use
:func:`set_place`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

PARTS = ("steady", "cool-down")
"""Parts of a pipeline's step: ``"cool-down"`` follows a rank's last forward pass, ``"steady"`` is the rest."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place in a model.

    Attributes:
        stage: stage of the pipeline, from 0.
        layer: layer of the whole model, from 0; for a send between two stages the layer whose output it is about.
        part: one of :data:`PARTS`.
        link: key of a send's error feedback: one name for each neighbour and direction.
    """

    stage: int | None = None
    layer: int | None = None
    part: str | None = None
    link: str | None = None


NOWHERE = Place()

_own = threading.local()


def place() -> Place:
    """Return the place that this thread has set."""
    found: Place = getattr(_own, "place", NOWHERE)
    return found


def set_place(there: Place) -> Place:
    """Set this thread's place from now on; return the place before."""
    before = place()
    _own.place = there
    return before


@contextmanager
def in_place(
    *, stage: int | None = None, layer: int | None = None, part: str | None = None, link: str | None = None
) -> Iterator[None]:
    """Set the place of all messages that this thread sends inside; parts that are None stay as they are around this.

    Args:
        stage, layer, part, link: see :class:`Place`.

    Raises:
        ValueError: the part is none of :data:`PARTS`.
    """
    if part is not None and part not in PARTS:
        raise ValueError(f"a part is {' or '.join(map(repr, PARTS))}, not {part!r}")
    given: dict[str, Any] = {"stage": stage, "layer": layer, "part": part, "link": link}
    before = set_place(replace(place(), **{k: v for k, v in given.items() if v is not None}))
    try:
        yield
    finally:
        set_place(before)
