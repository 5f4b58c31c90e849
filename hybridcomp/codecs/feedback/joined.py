"""Memories of several arrays that one operation carries."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp import native
from hybridcomp.codecs.feedback.memory import Memory, Scratch


class JoinedMemory:
    """Memories of one form side by side, each of which remains its key's own.

    Attributes:
        native: the kernels' memory, for operations whose codec has an ``Encoder``.
    """

    def __init__(self, parts: Sequence[Memory], scratch: Scratch) -> None:
        """Take memories whose steps have begun; at least one."""
        self.native = native.kernels().JoinedMemory([part.native for part in parts], scratch.rooms)
