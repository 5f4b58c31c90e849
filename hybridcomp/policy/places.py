"""Name the place in a model to which a message belongs, for policies that tell places apart.

A program says it around what it sends; a thread says it for itself. What nobody says is None, and rules that ask for it
then do as if they did not. Who trains by hooks, which begin and end in two calls, uses :func:`set_place`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

PARTS = ("steady", "cool-down")
"""Parts of a pipeline's step: ``"cool-down"`` is what follows a rank's last forward pass, ``"steady"`` the rest."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a model.

    Attributes:
        stage: of the pipeline, from 0.
        layer: of the whole model, from 0; a send between two stages is of the layer whose output it is about.
        part: one of :data:`PARTS`.
        link: what a send's error feedback is kept under: one name for each neighbour and direction.
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
    """Set the place of all that this thread sends inside; what is None stays as it is around this.

    Args:
        stage, layer, part, link: see :class:`Place`.

    Raises:
        ValueError: a part that is none of :data:`PARTS`.
    """
    if part is not None and part not in PARTS:
        raise ValueError(f"a part is {' or '.join(map(repr, PARTS))}, not {part!r}")
    given: dict[str, Any] = {"stage": stage, "layer": layer, "part": part, "link": link}
    before = set_place(replace(place(), **{k: v for k, v in given.items() if v is not None}))
    try:
        yield
    finally:
        set_place(before)
