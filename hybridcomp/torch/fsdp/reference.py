"""Keep the reference of differences: the parameters as all ranks decoded them last.

As in SDP4Bit (arXiv:2410.15526), a rank sends how its part differs from the reference, which all ranks have. The error
of a message is part of the next difference, so errors do not repeat, and differences are small, so errors are too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridcomp.torch.fsdp.segments import Cut, whole
from hybridcomp.torch.phases import in_backward

Tensor = torch.Tensor


class Reference:
    """The decoded parameters of a module, whole, on every rank: as much memory as the module unsharded.

    The first values travel uncompressed. In the backward pass nothing travels: parameters have not changed since the
    forward pass, and the reference has them.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None  # the buffer of an all-gather
        self._saved: npt.NDArray[np.uint8] | None = None  # bytes of this rank's part, from a checkpoint

    def all_gather(self, collectives: Any, output: Tensor, own: Tensor, cut: Cut, phase: str) -> Any:
        """Start an all-gather of differences into ``output``; return the work, or None if all is there."""
        if self._values is None and self._saved is not None:
            self._restore(collectives, output, own, phase)
        values = self._values
        if values is None or values.numel() != output.numel() or values.dtype != output.dtype:
            exact = whole(cut.size, "the first values, to which differences refer")
            return collectives.all_gather(output, own, exact, phase, lambda: self._take(output))
        if in_backward():
            output.copy_(values)
            return None
        delta = torch.empty_like(output)
        rank = collectives.rank
        mine, known = (x[rank * cut.size : (rank + 1) * cut.size] for x in (delta, values))
        mine.copy_(own)
        for segment, _ in cut.encoded:
            at = slice(segment.start, segment.stop)
            mine[at] -= known[at]

        def add() -> None:
            rows, deltas = values.view(-1, cut.size), delta.view(-1, cut.size)
            for segment, _ in cut.encoded:
                rows[:, segment.start : segment.stop] += deltas[:, segment.start : segment.stop]
            for segment, _ in cut.exact:
                rows[:, segment.start : segment.stop] = deltas[:, segment.start : segment.stop]
            output.copy_(values)
            if not bool(torch.isfinite(values).all()):
                self._values = None  # nothing can refer to that; all ranks see the same

        return collectives.all_gather(delta, mine, cut, phase, add)

    def _take(self, values: Tensor) -> None:
        self._values = values.clone() if bool(torch.isfinite(values).all()) else None

    def _restore(self, collectives: Any, output: Tensor, own: Tensor, phase: str) -> None:
        """Gather the parts that the ranks have from their checkpoints."""
        saved, self._saved = self._saved, None
        assert saved is not None
        part = torch.from_numpy(saved).view(own.dtype).to(own.device)
        values = torch.empty_like(output)
        exact = whole(part.numel(), "from a checkpoint, what differences refer to")
        collectives.all_gather(values, part, exact, phase).wait()
        self._values = values

    # -- saving --------------------------------------------------------------------------------------

    def part(self, rank: int, ranks: int) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the bytes of this rank's part; None if there is nothing yet."""
        if self._values is None:
            return None if self._saved is None else self._saved.copy()
        part = self._values.view(ranks, -1)[rank].cpu().contiguous()
        return part.view(torch.uint8).numpy().copy()

    def load(self, part: npt.NDArray[np.uint8] | None) -> None:
        """Begin with the parts that :meth:`part` returned on all ranks, or with nothing."""
        self._values, self._saved = None, part
